"""How good the selections of policies are, against exact attention.

A *unit* selects for itself: a KV head with its group of query heads, or one query head. The
importance of a token for a unit is the exact attention weight, summed over the unit's query heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.eval.labels import windows_of
from offload.bench.eval.summary import mean
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.policies import Policy
from offload.runtime.runtime import Runtime

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating]
METRICS = ("overlap", "mass_kept", "mass_of_topk", "output_error")


@dataclass(frozen=True)
class ReferenceBudget:
    """What exact top-k attends to at a budget; selections are compared with that.

    Attributes:
        budget_tokens: per unit, the others included.
        sink_tokens, recent_tokens: first and last tokens that are attended in any case.
    """

    budget_tokens: int
    sink_tokens: int
    recent_tokens: int

    def selectable(self, kv_len: int) -> tuple[int, int]:
        """Tokens [first, last) are there to choose from."""
        first = min(self.sink_tokens, kv_len)
        return first, max(first, kv_len - self.recent_tokens)


@dataclass(frozen=True)
class UnitQuality:
    """One unit's selection at one step.

    Attributes:
        mass_kept: share of the importance of all tokens but the sinks that was attended.
        mass_of_topk: that, relative to what exact top-k keeps with the reference budget.
        overlap: share of the chosen tokens that are among the equally many most important ones;
            sinks and recent tokens do not count; None if nothing else was attended.
    """

    mass_kept: float
    mass_of_topk: float
    overlap: float | None


def largest(values: FloatArray, count: int) -> Int64Array:
    """Positions of the `count` largest values, in no order."""
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(values):
        return np.arange(len(values))
    return np.argpartition(values, len(values) - count)[len(values) - count :]


def selection_quality(
    importance: FloatArray, selection: Int32Array, reference: ReferenceBudget
) -> UnitQuality:
    """Compare the attended tokens of one unit with exact top-k.

    Args:
        importance: [kv_len].
        selection: the attended tokens, sinks and recent ones included, each once.
    """
    kv_len = len(importance)
    first, last = reference.selectable(kv_len)
    kept = float(importance[selection[selection >= first]].sum())
    total = float(importance[first:].sum())

    choices = max(reference.budget_tokens - first - (kv_len - last), 0)
    best = importance[first:last][largest(importance[first:last], choices)]
    best_kept = float(best.sum()) + float(importance[last:].sum())

    chosen = selection[(selection >= first) & (selection < last)] - first
    overlap = None
    if len(chosen):
        most = largest(importance[first:last], len(chosen))
        overlap = len(np.intersect1d(chosen, most, assume_unique=True)) / len(chosen)
    return UnitQuality(kept / total, kept / best_kept, overlap)


class SelectionJudge:
    """Compares what a policy attends to with exact attention, at every n-th decode step.

    Args:
        runtime: decodes one sequence, on the CPU.
        every: n.
        dense_layers: the first ones, which are left out.
    """

    def __init__(self, runtime: Runtime, every: int, dense_layers: int) -> None:
        self._runtime, self._every, self._dense_layers = runtime, every, dense_layers
        self._seen: dict[str, list[float]] = defaultdict(list)

    def judges(self, step: int) -> bool:
        """Whether it looks at this decode step."""
        return step % self._every == 0

    @contextmanager
    def looking(self, step: int) -> Iterator[None]:
        """Look at what is decoded meanwhile, if it `judges` the step."""
        attention = self._runtime.attention
        attention.on_attended = self._see if self.judges(step) else None
        try:
            yield
        finally:
            attention.on_attended = None

    def measured(self) -> dict[str, float | None]:
        """Means of `METRICS` over steps, layers and those units that selected; of full attention
        over all."""
        return {name: mean(self._seen[name]) for name in METRICS}

    def _see(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        """One layer of a step of one sequence with one new token."""
        if layer_idx < self._dense_layers:
            return
        attention, kv_len = self._runtime.attention, int(step.kv_lens[0])
        store, policy = attention.store, attention.policy
        row = slice(0, attention.num_qo_heads * store.head_dim)
        exact = ExactAttention(
            store,
            step.seqs[0],
            layer_idx,
            query[0, row],
            kv_len=kv_len,
            sm_scale=self._runtime.lean.sm_scale,
        )
        num_units = attention.num_qo_heads if policy.per_query_head else store.num_kv_heads
        self._seen["output_error"].append(exact.relative_error(out[0, row], [[]] * num_units))
        reference = ReferenceBudget(kv_len, 0, 1)
        selections: Sequence[Sequence[int]] = [range(kv_len)] * num_units
        if policy.selects:
            windows = windows_of("exact_topk", policy.budget_tokens)
            reference = ReferenceBudget(policy.budget_tokens, **windows)
            selections = attention.last_selection()
        for importance, tokens in zip(exact.importances(num_units), selections, strict=True):
            if not len(tokens):  # a dense unit of a policy that selects elsewhere, or a bypass
                continue
            found = selection_quality(importance, np.array(tokens, np.int32), reference)
            self._seen["mass_kept"].append(found.mass_kept)
            if policy.selects:
                self._seen["mass_of_topk"].append(found.mass_of_topk)
            if found.overlap is not None:
                self._seen["overlap"].append(found.overlap)


def most_dense_layers(policies: Sequence[Policy]) -> int:
    """The first layers that are dense under any of them: what selects is judged in the others."""
    return max((policy.dense_layers for policy in policies if policy.selects), default=0)
