"""Times layers of a decode step on a GPU as a step runs them, with work on other streams.

A kernel that runs beside others takes longer than by itself, and so do the others: fetched rows are
written to the memory that linear layers read from. How much, only both together can tell. So a
graph of several layers is timed with that work on a stream of its own, as `DeviceStep` forks and
joins it, and without. On CPU tensors one follows the other: for tests.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_ops.gathered_attention import gathered_attention, num_gathered_splits
from offload.decode.gpu.gpu_sync import SideStream, SideWork
from offload.measuring.machine.kernels import (
    PAGE_TOKENS,
    RECENT,
    SINKS,
    AttentionBench,
    microseconds,
)
from offload.planning.cost_table import CostTable

LAYERS = 8  # in a graph
_FETCHED_BYTES = tuple(2**n for n in (18, 19, 20, 21, 22, 23, 24))  # of a layer
_KV_LEN = 65536
Call = Callable[[], Any]


class Lane:
    """A stream beside a graph's own, of which one piece of work at a time is not joined yet."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream() if device.type == "cuda" else None
        self._work: SideWork | None = None

    def fork(self, call: Call) -> None:
        """Start `call` beside what follows."""
        with contextlib.nullcontext() if self._side is None else self._side.fork() as self._work:
            call()

    def join(self) -> None:
        """Let what follows wait for it."""
        if self._work is not None:
            SideStream.join(self._work)
            self._work = None


class LayerBench(AttentionBench):
    """Layers in which rows are fetched, or a selection is published, beside the linear layers."""

    def gather_beside(self, linears: Sequence[Call]) -> CostTable:
        """What a layer takes longer than without fetched rows, by their bytes.

        Args:
            linears: the linear layers of some layers, each over weights of its own.
        """
        bare = self._layer_us(linears, [])
        points = {}
        for wanted in _FETCHED_BYTES:
            num_bytes = self.sized(wanted, 8 * self.token_bytes)
            chosen = min(num_bytes // self.token_bytes, self.sized(_KV_LEN, 512) // 2)
            us = self._layer_us(linears, self._fetching(chosen))
            points[chosen * self.token_bytes] = max(0.0, us - bare)
        return CostTable.measured(sorted(points.items()))

    def _layer_us(self, linears: Sequence[Call], fetching: Sequence[tuple[Call, Call]]) -> float:
        """Time of a layer: window, attention to fetched rows, merge, linear layers.

        Args:
            fetching: (fetch, attend) of layers, in turns; none: nothing is fetched.
        """
        window, merge = self.window_and_merge_calls()
        lane = Lane(self.device)

        def layers() -> None:
            for i in range(LAYERS):
                window[i % len(window)]()
                if fetching:
                    lane.join()
                    # The next layer's, beside all that is left of this one.
                    lane.fork(fetching[(i + 1) % len(fetching)][0])
                    fetching[i % len(fetching)][1]()
                merge()
                linears[i % len(linears)]()
            lane.join()

        return microseconds([layers], self.device) / LAYERS

    def _fetching(self, chosen: int) -> list[tuple[Call, Call]]:
        """Fetching `chosen` rows per head, and attending to them, of layers in turns."""
        shape = self.shape
        kv_len = -(-self.sized(_KV_LEN, 512) // PAGE_TOKENS) * PAGE_TOKENS
        query, out = self.random(1, self.heads), self.zeros(1, self.heads)
        lse = self.zeros(1, shape.num_qo_heads)
        splits = num_gathered_splits(shape.num_kv_heads, chosen, self.num_multiprocessors)
        partials, counts = self.partials(splits), self.counts(chosen + SINKS + RECENT)
        position, heads = self.last_position(kv_len), self.kv_heads()
        sides = [self.random(1, 2, shape.num_kv_heads, chosen, shape.head_dim) for _ in range(2)]
        outs = [sides[i % 2] for i in range(LAYERS)]
        attends: list[Call] = [
            functools.partial(
                gathered_attention,
                query,
                side,
                counts,
                position,
                heads,
                group_size=shape.group_size,
                sink_tokens=SINKS,
                recent_tokens=RECENT,
                sm_scale=shape.head_dim**-0.5,
                **partials,
                out=out,
                lse=lse,
            )
            for side in outs
        ]
        return list(zip(self.gathering_calls(kv_len, chosen, outs), attends, strict=True))

    def top_k_beside(self, linears: Sequence[Call]) -> CostTable:
        """What a layer whose heads retrieve takes longer if their top-k runs beside it, by scores:
        forked behind the attention, joined before the next layer's."""
        points = {}
        for num_scores, attend, choose in self.retrieving_calls():
            times = [self._retrieving_us(linears, attend, call) for call in (choose, None)]
            points[num_scores] = max(0.0, times[0] - times[1])
        return CostTable.measured(sorted(points.items()))

    def _retrieving_us(
        self, linears: Sequence[Call], attend: Sequence[Call], choose: Call | None
    ) -> float:
        _, merge = self.window_and_merge_calls()
        lane = Lane(self.device)

        def layers() -> None:
            for i in range(LAYERS):
                lane.join()
                attend[i % len(attend)]()
                if choose is not None:
                    lane.fork(choose)
                merge()
                linears[i % len(linears)]()
            lane.join()

        return microseconds([layers], self.device) / LAYERS
