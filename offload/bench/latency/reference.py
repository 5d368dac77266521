"""Exact attention of one decode step, to check outputs and to judge selections by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload.bench.made.attention_statistics import SINK_TOKENS
from offload.kv.store import KVStore

# The output is rounded to the cache's dtype, and so are the softmax weights inside some kernels.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class SelectionQuality:
    """How a step's selections compare with the best of their size.

    Attributes:
        top_overlap: share of the chosen tokens (sinks and recent ones left out) that are among as
            many of largest weight; None if none were to choose.
        mass_kept: of the attention beside the first SINK_TOKENS, what the attended tokens hold.
        answered: share of units that the policy answered without attending.
    """

    top_overlap: float | None
    mass_kept: float
    answered: float


class ExactAttention:
    """One layer of one sequence in float32, with sums in float64.

    Args:
        query: [num_qo_heads * head_dim].
        kv_len: tokens that it sees; they need not be committed.
    """

    def __init__(
        self,
        store: KVStore,
        seq: int,
        layer_idx: int,
        query: Tensor,
        *,
        kv_len: int,
        sm_scale: float,
    ) -> None:
        self._dtype = store.dtype
        self._kv_len = kv_len
        self._keys, self._values = store.gather(seq, layer_idx, 0, kv_len)
        self._queries = query.float().view(store.num_kv_heads, -1, store.head_dim)
        weights = [
            ((q @ k.float().T) * sm_scale).softmax(-1)
            for q, k in zip(self._queries, self._keys, strict=True)
        ]
        self.weights = torch.stack(weights)  # [num_kv_heads, group_size, kv_len]

    def check_output(self, out: Tensor, selection: Sequence[Sequence[int] | None]) -> float:
        """Relative L2 error of `out` [num_qo_heads * head_dim] over the units that were attended.

        Args:
            selection: tokens of each unit (KV head or query head); [] means all of them, None
                that the unit is not checked.

        Raises:
            ArithmeticError: more than rounding explains.
        """
        num_kv_heads, group_size, head_dim = self._queries.shape
        per_head = len(selection) > num_kv_heads
        got = out.double().view(num_kv_heads, group_size, head_dim)
        difference = norm = 0.0
        for unit, tokens in enumerate(selection):
            if tokens is None:
                continue
            kv_head = unit // group_size if per_head else unit
            heads = slice(unit % group_size, unit % group_size + 1) if per_head else slice(None)
            expected = self._attend(kv_head, heads, tokens)
            difference += float((got[kv_head, heads] - expected).square().sum())
            norm += float(expected.square().sum())
        error = float(np.sqrt(difference / max(norm, 1e-30)))
        tolerance = TOLERANCE[self._dtype]
        if not error <= tolerance:
            raise ArithmeticError(
                f"the output differs from the reference by {error:.2g} (relative L2), "
                f"more than {tolerance:.2g}"
            )
        return error

    def quality(
        self,
        selection: Sequence[Sequence[int]],
        attends_to_all: Sequence[bool],
        *,
        sink_tokens: int,
        recent_tokens: int,
    ) -> SelectionQuality:
        """Judge the selections of all units.

        Args:
            attends_to_all: of each unit; others with an empty selection were answered.
            sink_tokens, recent_tokens: what is attended anyway, and not chosen.
        """
        num_kv_heads, group_size, _ = self._queries.shape
        per_head = len(selection) > num_kv_heads
        last = self._kv_len - recent_tokens
        masses: list[float] = []
        overlaps: list[float] = []
        answered = 0
        for unit, (tokens, everything) in enumerate(zip(selection, attends_to_all, strict=True)):
            if everything:
                masses.append(1.0)
                overlaps.append(1.0)
                continue
            if not len(tokens):
                answered += 1
                continue
            if per_head:
                importance = self.weights[unit // group_size, unit % group_size]
            else:
                importance = self.weights[unit].sum(0)
            chosen = torch.as_tensor(tokens, dtype=torch.int64)
            beside_sinks = chosen[chosen >= SINK_TOKENS]
            rest = float(importance[SINK_TOKENS:].double().sum())
            masses.append(float(importance[beside_sinks].double().sum()) / max(rest, 1e-30))
            middle = chosen[(chosen >= sink_tokens) & (chosen < last)]
            if middle.numel():
                best = importance[sink_tokens:last].topk(middle.numel()).indices + sink_tokens
                common = torch.isin(middle, best, assume_unique=True).sum()
                overlaps.append(float(common) / middle.numel())
        return SelectionQuality(
            top_overlap=float(np.mean(overlaps)) if overlaps else None,
            mass_kept=float(np.mean(masses)) if masses else 1.0,
            answered=answered / len(selection),
        )

    def _attend(self, kv_head: int, heads: slice, tokens: Sequence[int]) -> Tensor:
        weights, values = self.weights[kv_head, heads], self._values[kv_head]
        if not len(tokens):
            # In pieces: a float64 copy of all values of a head at 128K is 134 MB.
            pieces = range(0, self._kv_len, 16384)
            parts = [
                weights[:, i : i + 16384].double() @ values[i : i + 16384].double() for i in pieces
            ]
            return torch.stack(parts).sum(0)
        chosen = torch.as_tensor(tokens, dtype=torch.int64)
        part = weights[:, chosen].double()
        return part @ values[chosen].double() / part.sum(1, keepdim=True)
