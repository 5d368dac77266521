"""Temperature over time: what `hard_kv` would calibrate later, against what it has (Figure 17).

`BlockShare` solves for a temperature of each layer and KV head when its state is built, at the end
of a prompt. Here the same is solved again while tokens are generated, from all keys that were
written and the last window of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.budget.written_rows import WrittenRows
from offload.policies.block_share import BlockShare
from offload.policies.logits_calibration import WINDOW_QUERIES
from offload.policies.sequence_state import RecentQueries
from offload.runtime.runtime import Runtime

Betas = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LaterTemperatures:
    """After some generated tokens.

    Attributes:
        tokens: that were generated.
        of_layers: temperature, of the one that the policy has: geometric means over the KV heads of
            each layer that have both; None where none has. No layers: the policy has none yet.
        solved: share of KV heads that have both, of those that the policy selects for.
    """

    tokens: int
    of_layers: list[float | None]
    solved: float


class TemperatureObserver:
    """Give `attended` to `DecodeAttention.on_attended`, of a runtime that `has_temperatures`.

    Args:
        rows: to which the newest are added by somebody else.
    """

    def __init__(self, runtime: Runtime, rows: WrittenRows) -> None:
        assert isinstance(runtime.attention.policy.selecting, BlockShare)
        self._attention, self._rows = runtime.attention, rows
        self._share = runtime.attention.policy.selecting
        store, num_qo_heads = runtime.store, runtime.attention.num_qo_heads
        size = (num_qo_heads, WINDOW_QUERIES, store.head_dim, store.dtype)
        self._queries = [RecentQueries(*size) for _ in range(store.num_layers)]
        self._seq = -1

    def attended(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        """See one layer of a step of one sequence with one new token."""
        self._seq = step.seqs[0]
        num_qo_heads = self._attention.num_qo_heads
        row = query[0, : num_qo_heads * self._attention.store.head_dim]
        self._queries[layer_idx].append(row.view(num_qo_heads, 1, -1), self._rows.kv_len(layer_idx))

    def solved(self, tokens: int) -> LaterTemperatures:
        """After `tokens` that were generated, all of which were seen."""
        arrays = self._attention.states.arrays_of(self._seq)
        layers = [] if arrays is None else arrays.layers
        ratios = [x["betas"] / self._betas(i) if x else np.empty(0) for i, x in enumerate(layers)]
        known = [ratio[ratio > 0] for ratio in ratios]
        num_heads = sum(map(len, ratios))
        return LaterTemperatures(
            tokens,
            [float(np.exp(np.log(x).mean())) if len(x) else None for x in known],
            sum(map(len, known)) / num_heads if num_heads else 0.0,
        )

    def _betas(self, layer_idx: int) -> Betas:
        """[num_kv_heads], 1 / temperature of one layer; NaN: not solved."""
        keys, values = self._rows.held(layer_idx)
        kv_len = keys.shape[1]
        known = self._attention.states.build_context(self._seq, layer_idx, keys, values, kv_len)
        queries = self._queries[layer_idx].in_order(kv_len)
        betas = self._share.build(replace(known, queries=queries))["betas"]
        return np.where(betas > 0, betas, np.nan)


def has_temperatures(runtime: Runtime) -> bool:
    """Whether its policy calibrates any."""
    return isinstance(runtime.attention.policy.selecting, BlockShare)
