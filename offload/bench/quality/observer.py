"""Looks on while a model decodes: what each layer attended to, against exact attention."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.quality.metrics import (
    ReferenceBudget,
    Stability,
    exact_attention,
    importance_of_units,
    mean,
    relative_error,
    selection_quality,
)
from offload.decode.attention import DecodeAttention
from offload.policies.base import NO_MEMBER

_MEANS = (
    "attended_tokens",
    "selecting_share",
    "overlap",
    "recall",
    "mass_kept",
    "mass_of_topk",
    "output_error",
)


Tokens = npt.NDArray[np.int32]


@contextmanager
def looked_at(attention: DecodeAttention, attended: Callable[..., None]) -> Iterator[None]:
    """`attended` sees each layer of each decode step, until the end or an error."""
    attention.on_attended = attended
    try:
        yield
    finally:
        attention.on_attended = None


@dataclass
class SelectionObserver:
    """Give `attended` to `DecodeAttention.on_attended`; set `sampling` before each step.

    Selections are followed at every step. At sampled steps each layer is attended exactly, too, and
    its units are compared. Layers before `dense_layers` are left out for every policy alike.

    Attributes:
        reference: what exact top-k would attend to; None compares with no budget.
        capacity_tokens: of the longest sequence to come.
        window: of the window hit rate, in steps.
        possible_tokens: keys that units of observed layers could have scored.
        exact: float32 [num_qo_heads, head_dim], the output of exact attention in each layer of each
            sampled step.
    """

    attention: DecodeAttention
    reference: ReferenceBudget | None
    dense_layers: int
    sm_scale: float
    capacity_tokens: int
    window: int
    sampling: bool = False
    possible_tokens: int = 0
    exact: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        attention, policy = self.attention, self.attention.policy
        self._seen: dict[str, list[float]] = {name: [] for name in _MEANS}
        self._stability: dict[tuple[int, int], Stability] = defaultdict(
            lambda: Stability(self.capacity_tokens, self.window)
        )
        self._num_units = (
            attention.num_qo_heads if policy.per_query_head else attention.store.num_kv_heads
        )
        # No tokens: all of them where the policy does not select, none where it answers by itself.
        units = (attention.store.num_layers, self._num_units)
        members = policy.unit_members(*units) if policy.selects else None
        everywhere = not policy.selects or attention.roles is not None
        self._none_means_all = (
            np.full(units, everywhere) if members is None else members == NO_MEMBER
        )

    def attended(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        """See one layer of a step of one sequence with one new token."""
        if layer_idx < self.dense_layers:
            return
        kv_len, policy = int(step.kv_lens[0]), self.attention.policy
        selections = [
            np.array(tokens, np.int32) if tokens else None
            for tokens in self.attention.last_selection()
        ]
        self.possible_tokens += kv_len * self._num_units
        if policy.selects:
            first, last = policy.sink_tokens, kv_len - policy.recent_tokens
            for unit, selection in enumerate(selections):
                chosen = np.empty(0, np.int32) if selection is None else selection
                chosen = chosen[(chosen >= first) & (chosen < last)]
                self._stability[layer_idx, unit].update(chosen)
        if self.sampling:
            self._compare(layer_idx, step.seqs[0], query, out, selections, kv_len)

    def measured(self) -> dict[str, float | None]:
        """Means over sampled steps, layers and units by `_MEANS`; of the stability over all."""
        stabilities = self._stability.values()
        return {name: mean(values) for name, values in self._seen.items()} | {
            "jaccard": mean(s.jaccard for s in stabilities),
            "window_hit": mean(s.window_hit for s in stabilities),
        }

    def _add(self, name: str, value: float | None) -> None:
        """NaN counts nothing, and None."""
        if value is not None and not math.isnan(value):
            self._seen[name].append(value)

    def _compare(
        self,
        layer_idx: int,
        seq: int,
        query: Tensor,
        out: Tensor,
        selections: list[Tokens | None],
        kv_len: int,
    ) -> None:
        store, num_qo_heads = self.attention.store, self.attention.num_qo_heads
        keys, values = (rows.float() for rows in store.gather(seq, layer_idx, 0, kv_len))
        row = slice(0, num_qo_heads * store.head_dim)
        weights, exact = exact_attention(
            query[0, row].float().view(num_qo_heads, -1), keys, values, self.sm_scale
        )
        self._add("output_error", relative_error(out[0, row], exact))
        self.exact.append(exact)
        importance = importance_of_units(weights, self._num_units).numpy()
        for unit in range(self._num_units):
            selection = selections[unit] if selections else None
            self._add("selecting_share", selection is not None)
            if selection is None and not self._none_means_all[layer_idx, unit]:
                self._add("attended_tokens", 0)
                continue
            self._add("attended_tokens", kv_len if selection is None else len(selection))
            if selection is None and self.reference is not None:
                continue  # a dense unit of a policy that selects elsewhere
            tokens = np.arange(kv_len, dtype=np.int32) if selection is None else selection
            reference = self.reference or ReferenceBudget(kv_len, 0, 1)
            quality = selection_quality(importance[unit], tokens, reference)
            self._add("mass_kept", quality.mass_kept)
            self._add("overlap", quality.overlap)
            self._add("recall", quality.recall)
            if self.reference is not None:
                self._add("mass_of_topk", quality.mass_of_topk)
