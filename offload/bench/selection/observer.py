"""Looks on while a model decodes: what each layer attended to, against exact attention."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.selection.metrics import (
    ReferenceBudget,
    Stability,
    exact_attention,
    importance_of_units,
    mean,
    relative_error,
    selection_quality,
)
from offload.decode.attention import DecodeAttention

_MEANS = (
    "attended_tokens",
    "selecting_share",
    "overlap",
    "mass_kept",
    "mass_of_topk",
    "output_error",
)


class SelectionObserver:
    """Give `attended` to `DecodeAttention.on_attended`; set `sampling` before each step.

    Selections are followed at every step. At sampled steps each layer is attended exactly, too, and
    its units are compared. Layers before `dense_layers` are left out for every policy alike.

    Args:
        reference: what exact top-k would attend to; None compares with no budget.
        sm_scale: softmax scale.
        capacity_tokens: of the longest sequence to come.
        window: of the window hit rate, in steps.
    """

    def __init__(
        self,
        attention: DecodeAttention,
        *,
        reference: ReferenceBudget | None,
        dense_layers: int,
        sm_scale: float,
        capacity_tokens: int,
        window: int,
    ) -> None:
        self.sampling = False
        self._seen: dict[str, list[float]] = {name: [] for name in _MEANS}
        self.possible_tokens = 0  # keys that units of observed layers could have scored
        self._attention = attention
        self._reference = reference
        self._dense_layers = dense_layers
        self._sm_scale = sm_scale
        self._stability: dict[tuple[int, int], Stability] = {}
        self._capacity_tokens = capacity_tokens
        self._window = window
        policy = attention.policy
        self._num_units = (
            attention.num_qo_heads if policy.per_query_head else attention.store.num_kv_heads
        )
        # No tokens: all of them where the policy does not select, none where it answers by itself.
        self._none_means_all = (
            not policy.selects
            or policy.roles(attention.store.num_layers, self._num_units) is not None
        )

    def attended(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        """See one layer of a step of one sequence with one new token."""
        if layer_idx < self._dense_layers:
            return
        kv_len = int(step.kv_lens[0])
        selections = [
            np.array(tokens, np.int32) if tokens else None
            for tokens in self._attention.last_selection()
        ]
        self.possible_tokens += kv_len * self._num_units
        for unit, selection in enumerate(selections):
            self._follow(layer_idx, unit, selection, kv_len)
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

    def _follow(
        self, layer_idx: int, unit: int, selection: npt.NDArray[np.int32] | None, kv_len: int
    ) -> None:
        policy = self._attention.policy
        if not policy.selects:
            return
        key = (layer_idx, unit)
        if key not in self._stability:
            self._stability[key] = Stability(self._capacity_tokens, self._window)
        if selection is None:
            selection = np.empty(0, np.int32)
        is_chosen = (selection >= policy.sink_tokens) & (selection < kv_len - policy.recent_tokens)
        self._stability[key].update(selection[is_chosen])

    def _compare(
        self,
        layer_idx: int,
        seq: int,
        query: Tensor,
        out: Tensor,
        selections: list[npt.NDArray[np.int32] | None],
        kv_len: int,
    ) -> None:
        store, num_qo_heads = self._attention.store, self._attention.num_qo_heads
        keys, values = (rows.float() for rows in store.gather(seq, layer_idx, 0, kv_len))
        row = slice(0, num_qo_heads * store.head_dim)
        weights, exact = exact_attention(
            query[0, row].float().view(num_qo_heads, -1), keys, values, self._sm_scale
        )
        self._add("output_error", relative_error(out[0, row], exact))
        importance = importance_of_units(weights, self._num_units).numpy()
        for unit in range(self._num_units):
            selection = selections[unit] if selections else None
            self._add("selecting_share", selection is not None)
            if selection is None and not self._none_means_all:
                self._add("attended_tokens", 0)
                continue
            self._add("attended_tokens", kv_len if selection is None else len(selection))
            if selection is None and self._reference is not None:
                continue  # a dense unit of a policy that selects elsewhere
            tokens = np.arange(kv_len, dtype=np.int32) if selection is None else selection
            reference = self._reference or ReferenceBudget(kv_len, 0, 1)
            quality = selection_quality(importance[unit], tokens, reference)
            self._add("mass_kept", quality.mass_kept)
            self._add("overlap", quality.overlap)
            if self._reference is not None:
                self._add("mass_of_topk", quality.mass_of_topk)
