"""Times each kind of attention kernel on a GPU by itself, over made operands.

Kernels run in CUDA graphs of many calls over operands that no cache holds, as in a decode step. On
CPU tensors the reference code runs: for tests.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_ops.gather_rows import gather_rows
from gpu_ops.merge_state import merge_state
from gpu_ops.paged_attention import (
    num_kv_splits,
    num_retrieval_splits,
    retrieval_attention,
)
from gpu_ops.top_k_candidates import TopKBuffers
from gpu_ops.top_k_tokens import top_k_tokens
from gpu_ops.window_attention import window_attention
from offload.planning.cost_table import CostTable

if TYPE_CHECKING:
    from offload.models.shape import ModelShape

_ROUNDS = 5
CALLS = 32  # in one graph
COLD_BYTES = 512 * 2**20  # of operands in turns; the L2 of an H200 holds 60 MB
PAGE_TOKENS, SINKS, RECENT = 256, 4, 64
_KV_LENS = (256, 2048, 8192, 32768, 131072)  # that attention is measured at, all heads
_RETRIEVED_LENS, _RETRIEVED_TOKENS = (4096, 32768, 131072), 1024
_GATHERED_TOKENS = (64, 256, 1024, 4096)


def microseconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median time of a call, of `calls` captured one after the other; over `_ROUNDS` replays.

    Each should read what the others leave in no cache.
    """
    for call in calls[:2]:
        call()  # loads kernels
    if device.type != "cuda":
        times = []
        for call in calls[:_ROUNDS]:
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return float(np.median(times))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    cuda: Any = torch.cuda
    start_event, end_event = (cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_ROUNDS):
        start_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        times.append(start_event.elapsed_time(end_event) * 1e3 / len(calls))
    return float(np.median(times))


class Operands:
    """Operands of one model's shape on one device, of one token."""

    def __init__(
        self, device: torch.device, shape: ModelShape, dtype: torch.dtype, scale: float
    ) -> None:
        self.device, self.shape, self.dtype, self.scale = device, shape, dtype, scale
        self.pinned = device.type == "cuda"
        self.heads = shape.num_qo_heads * shape.head_dim
        self.token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        self.num_multiprocessors = 1
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            self.num_multiprocessors = properties.multi_processor_count

    def sized(self, count: int, least: int = 1) -> int:
        return max(least, round(count * self.scale))

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float32, device=self.device).to(self.dtype)

    def zeros(self, *sizes: int) -> Tensor:
        """float32."""
        return torch.zeros(*sizes, device=self.device)

    def last_position(self, kv_len: int) -> Tensor:
        return torch.full((1,), kv_len - 1, dtype=torch.int64, device=self.device)

    def kv_heads(self) -> Tensor:
        """int32 [num_kv_heads], all of them."""
        return torch.arange(self.shape.num_kv_heads, dtype=torch.int32, device=self.device)

    def counts(self, budget: int) -> Tensor:
        """int32 [1, num_kv_heads]: as many tokens of each head."""
        sizes = (1, self.shape.num_kv_heads)
        return torch.full(sizes, budget, dtype=torch.int32, device=self.device)

    def partials(self, splits: int) -> dict[str, Any]:
        """Where `splits` parts of an attention put theirs."""
        num_heads = self.shape.num_qo_heads
        return {
            "partial_out": self.zeros(1, num_heads, splits, self.shape.head_dim),
            "partial_lse": self.zeros(1, num_heads, splits),
        }


class AttentionBench(Operands):
    """Attention over GPU pages and windows, and rows on their way from the host."""

    def attention(self) -> tuple[CostTable, float, float]:
        """Over pages of all heads, by bytes; then the window's and the merge's microseconds."""
        shape = self.shape
        longest = self.sized(max(_KV_LENS), PAGE_TOKENS)
        layers = max(1, min(4, self.sized(COLD_BYTES) // (longest * self.token_bytes) + 1))
        tables, keep = self._page_tables(longest, layers)
        query, out = self.random(1, self.heads), self.random(1, self.heads)
        splits = num_kv_splits(shape.num_kv_heads, self.num_multiprocessors)
        points = {}
        for kv_len in sorted({self.sized(n, 1) for n in _KV_LENS}):
            # Short contexts at places of their own, or the caches would hold them.
            position, pages = self.last_position(kv_len), -(-kv_len // PAGE_TOKENS)
            places = [
                table[:, first : first + pages].contiguous()
                for table in tables
                for first in range(0, table.shape[1] - pages + 1, pages)
            ][:CALLS]
            calls = [
                functools.partial(
                    retrieval_attention,
                    query,
                    table,
                    position,
                    None,
                    group_size=shape.group_size,
                    page_tokens=PAGE_TOKENS,
                    sm_scale=shape.head_dim**-0.5,
                    **self.partials(splits),
                    out=out,
                )
                for table in places
            ]
            points[kv_len * self.token_bytes] = microseconds(calls, self.device)
        del keep
        windows, merge = self.window_and_merge_calls()
        window_us = microseconds(windows * 4, self.device)
        return (
            CostTable.measured(sorted(points.items())),
            window_us,
            microseconds([merge] * CALLS, self.device),
        )

    def retrieval(self) -> tuple[CostTable, CostTable]:
        """All heads' attention that leaves scores, by bytes; and their top-k, by scores."""
        attended, chosen = {}, {}
        for num_scores, attend, choose in self.retrieving_calls():
            num_bytes = num_scores // self.shape.num_qo_heads * self.token_bytes
            attended[num_bytes] = microseconds(attend * (8 // len(attend)), self.device)
            chosen[num_scores] = microseconds([choose] * 8, self.device)
        return (
            CostTable.measured(sorted(attended.items())),
            CostTable.measured(sorted(chosen.items())),
        )

    def retrieving_calls(
        self,
    ) -> Iterator[tuple[int, list[Callable[[], Any]], Callable[[], Any]]]:
        """For some contexts: the number of scores, attention of some layers, and the top-k."""
        shape, lists = self.shape, self.shape.num_kv_heads
        splits = num_retrieval_splits(lists, self.num_multiprocessors)
        for wanted in _RETRIEVED_LENS:
            kv_len = self.sized(wanted, PAGE_TOKENS)
            num_slots = -(-kv_len // PAGE_TOKENS) * PAGE_TOKENS
            layers = min(8, self.sized(COLD_BYTES) // (kv_len * self.token_bytes) + 1)
            tables, keep = self._page_tables(num_slots, layers)
            position = self.last_position(kv_len)
            scores = torch.rand(1, lists, shape.group_size, num_slots, device=self.device)
            lse, out = self.zeros(1, shape.num_qo_heads), self.zeros(1, self.heads)
            attend: list[Callable[[], Any]] = [
                functools.partial(
                    retrieval_attention,
                    self.random(1, self.heads),
                    table,
                    position,
                    self.kv_heads(),
                    group_size=shape.group_size,
                    page_tokens=PAGE_TOKENS,
                    sm_scale=shape.head_dim**-0.5,
                    **self.partials(splits),
                    out=out,
                    lse=lse,
                    scores=scores,
                )
                for table in tables
            ]
            budget = min(_RETRIEVED_TOKENS, kv_len)
            choose = functools.partial(
                top_k_tokens,
                scores,
                lse,
                position,
                self.kv_heads(),
                sink_tokens=SINKS,
                recent_tokens=RECENT,
                budget_tokens=budget,
                shared=False,
                buffers=TopKBuffers.allocate(lists, num_slots, budget, self.device),
                selection=torch.zeros(1, lists, budget, dtype=torch.int32, device=self.device),
                counts=self.counts(0),
            )
            yield shape.num_qo_heads * kv_len, attend, choose
            del keep

    def gather(self) -> CostTable:
        """Rows of host pages, by bytes."""
        kv_len = self.sized(32768, PAGE_TOKENS)
        points = {}
        for wanted in _GATHERED_TOKENS:
            chosen = min(self.sized(wanted, 8), kv_len - SINKS - RECENT)
            outs = [
                self.random(1, 2, self.shape.num_kv_heads, chosen, self.shape.head_dim)
                for _ in range(8)
            ]
            calls = self.gathering_calls(kv_len, chosen, outs)
            points[chosen * self.token_bytes] = microseconds(calls, self.device)
        return CostTable.measured(sorted(points.items()))

    def gathering_calls(
        self, kv_len: int, chosen: int, outs: Sequence[Tensor]
    ) -> list[Callable[[], Any]]:
        """Each fetches another `chosen` rows per head, out of the same host pages, into one of
        `outs`."""
        shape, pages = self.shape, -(-kv_len // PAGE_TOKENS)
        sizes = (pages, 2, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim)
        host = torch.zeros(sizes, dtype=self.dtype, pin_memory=self.pinned)
        table = torch.arange(pages, dtype=torch.int64) * host[0].nbytes + host.data_ptr()
        page_table, budget = table[None].to(self.device), chosen + SINKS + RECENT
        counts, position, heads = self.counts(budget), self.last_position(kv_len), self.kv_heads()
        return [
            functools.partial(
                _gather,
                host,
                self._selection(kv_len, budget, seed).to(self.device),
                counts,
                page_table,
                position,
                heads,
                num_kv_heads=shape.num_kv_heads,
                page_tokens=PAGE_TOKENS,
                sink_tokens=SINKS,
                recent_tokens=RECENT,
                out=out,
            )
            for seed, out in enumerate(outs)
        ]

    def _selection(self, kv_len: int, budget: int, seed: int) -> Tensor:
        """int32 [1, num_kv_heads, budget]: sinks, sorted random tokens, recent tokens."""
        rng = np.random.default_rng(seed)
        middle = budget - SINKS - RECENT
        rows = [
            np.concatenate(
                [
                    np.arange(SINKS),
                    np.sort(rng.choice(kv_len - SINKS - RECENT, middle, replace=False)) + SINKS,
                    np.arange(kv_len - RECENT, kv_len),
                ]
            )
            for _ in range(self.shape.num_kv_heads)
        ]
        return torch.from_numpy(np.stack(rows).astype(np.int32))[None]

    def _page_tables(self, kv_len: int, layers: int) -> tuple[list[Tensor], Tensor]:
        """Addresses of zeroed pages on the device, and what keeps them alive."""
        shape, pages = self.shape, -(-kv_len // PAGE_TOKENS)
        memory = torch.zeros(
            layers,
            pages,
            *(2, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim),
            dtype=self.dtype,
            device=self.device,
        )
        first = torch.arange(layers * pages, dtype=torch.int64) * memory[0, 0].nbytes
        addresses = (first + memory.data_ptr()).view(layers, 1, pages)
        return list(addresses.to(self.device)), memory

    def window_and_merge_calls(self) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
        """Attention to windows of some layers, and merging it with the host's part."""
        shape = self.shape
        sizes = (1, 2, shape.num_kv_heads, SINKS + RECENT, shape.head_dim)
        query, out = self.random(1, self.heads), self.random(1, self.heads)
        position = self.last_position(100_001)
        o, lse = self.zeros(1, self.heads), self.zeros(1, shape.num_qo_heads)
        windows: list[Callable[[], Any]] = [
            functools.partial(
                window_attention,
                query,
                self.random(*sizes),
                position,
                sm_scale=shape.head_dim**-0.5,
                out=o,
                lse=lse,
            )
            for _ in range(8)
        ]
        from_host = torch.zeros(1, self.heads, pin_memory=self.pinned)
        host_lse = torch.zeros(1, shape.num_qo_heads, pin_memory=self.pinned)
        return windows, functools.partial(merge_state, o, lse, from_host, host_lse, out)


def _gather(keep: Tensor, *operands: Any, **options: Any) -> None:
    """`gather_rows` out of the pages of `keep`, which only their addresses name otherwise."""
    gather_rows(*operands, **options)
