"""How good a selection of tokens is, against exact attention: functions on arrays, no model.

A *unit* selects for itself: a KV head with its group of query heads, or one query head. The
importance of a token for a unit is the exact attention weight, summed over the unit's query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating]
_ROWS_AT_A_TIME = 64  # of logits in float64


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
        recall: the same of all attended tokens, sinks and recent ones included (LycheeCluster,
            Table 3).
    """

    mass_kept: float
    mass_of_topk: float
    overlap: float | None
    recall: float


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token in the dtype of its arguments: (weights, output).

    Args:
        query: [num_qo_heads, head_dim], rotated.
        keys, values: [num_kv_heads, kv_len, head_dim].

    Returns:
        Softmax weights [num_qo_heads, kv_len] and output [num_qo_heads, head_dim].
    """
    num_kv_heads, _, head_dim = keys.shape
    grouped = query.view(num_kv_heads, -1, head_dim)
    weights = torch.softmax(grouped @ keys.transpose(1, 2) * sm_scale, dim=-1)
    return weights.flatten(0, 1), (weights @ values).flatten(0, 1)


def importance_of_units(weights: torch.Tensor, num_units: int) -> torch.Tensor:
    """Softmax weights [num_qo_heads, kv_len] -> [num_units, kv_len], summed over unit members."""
    return weights.view(num_units, -1, weights.shape[-1]).sum(1)


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
    overlap = _share_of_largest(importance[first:last], chosen) if len(chosen) else None
    recall = _share_of_largest(importance, selection)
    return UnitQuality(kept / total, kept / best_kept, overlap, recall)


def _share_of_largest(values: FloatArray, chosen: Int32Array) -> float:
    """How many of the chosen positions are among those of the equally many largest values."""
    best = largest(values, len(chosen))
    return len(np.intersect1d(chosen, best, assume_unique=True)) / len(chosen)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """L2 norm of the difference over that of `exact`."""
    exact = exact.flatten().double()
    return float((out.flatten().double() - exact).norm() / exact.norm())


def kl_divergence(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || other), in nats, of each row of logits [n, vocab_size]: float64 [n]."""
    other = torch.log_softmax(logits.double(), -1)
    reference = torch.log_softmax(reference_logits.double(), -1)
    return (reference.exp() * (reference - other)).sum(-1).clamp_(min=0.0)


def negative_log_likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """-log p of each row's token, in nats: float64 [n] of logits [n, vocab_size], tokens [n]."""
    return -torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]


def mean_by_rows(
    metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    other: torch.Tensor,
) -> float:
    """The mean over all rows of one of the two above, which is taken of a few at a time."""
    pairs = zip(*(torch.split(x, _ROWS_AT_A_TIME) for x in (logits, other)), strict=True)
    return float(torch.cat([metric(*pair) for pair in pairs]).mean())


@dataclass
class Stability:
    """How a unit's selection changes from step to step (LycheeCluster, Appendix D).

    `update` takes the selected tokens S_t of consecutive steps t = 0, 1, …:

        Jaccard      |S_t & S_{t-1}| / |S_t | S_{t-1}|                  (Eq. 3), from t = 1
        window hit   |S_t & (S_{t-1} | ... | S_{t-w})| / |S_t|          (Eq. 4), from t = w

    After a step that selected nothing both start over.
    """

    capacity_tokens: int
    window: int = 32
    _steps: int = 0
    _last_size: int = 0
    _unbroken: int = 0  # steps with a selection up to and without the next one
    _last_step: Int32Array = field(init=False)  # of each token, the last step that selected it
    _jaccard: list[float] = field(default_factory=list)
    _window_hits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last_step = np.full(self.capacity_tokens, np.iinfo(np.int32).min // 2, np.int32)

    def update(self, selection: Int32Array) -> None:
        """Add a step: its tokens, each once, without sinks and recent ones."""
        size = len(selection)
        if size:
            age = self._steps - self._last_step[selection]
            if self._unbroken >= 1:
                common = int(np.count_nonzero(age == 1))
                self._jaccard.append(common / (size + self._last_size - common))
            if self._unbroken >= self.window:
                self._window_hits.append(np.count_nonzero(age <= self.window) / size)
            self._last_step[selection] = self._steps
        self._unbroken = self._unbroken + 1 if size else 0
        self._last_size = size
        self._steps += 1

    @property
    def jaccard(self) -> float | None:
        """Mean over the steps so far; None if no two selections followed each other."""
        return mean(self._jaccard)

    @property
    def window_hit(self) -> float | None:
        """Mean over the steps so far; None if there were not `window` selections before one."""
        return mean(self._window_hits)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
