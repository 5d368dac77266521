"""How much of the attention a policy keeps, estimated while a model decodes.

A *unit* is one KV head of one layer for one token that was decoded. The mass that it kept is the
share of exact attention, a softmax over all tokens, that went to the tokens that it attended to:
the mean over its query heads. Units that attend to all tokens keep 1; a random share of the others
was measured (`NativeAttention.start_probe`).

The bounds are those of Chernoff and Hoeffding for the mean of numbers in [0, 1]. They hold for any
number of probes and any distribution: chance is in what was drawn, not in the text.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.decode.attention import DecodeAttention

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float64]
CONFIDENCE = 0.95
_FIRST_LOOK = 16  # probes: below, no bound is worth a warning


@dataclass(frozen=True)
class MassKept:
    """A mean of shares of the attention mass, and bounds for it.

    Attributes:
        mean: None: not known.
    """

    mean: float | None
    low: float
    high: float


@dataclass(frozen=True)
class WorstHead:
    """The head whose upper bound is lowest. Its bounds hold for all heads at once."""

    layer_idx: int
    kv_head: int
    probes: int
    mass_kept: MassKept


@dataclass(frozen=True, eq=False)
class Quality:
    """What decode steps kept of the exact attention mass, with bounds at `confidence`.

    Attributes:
        probes: units that were compared with exact attention.
        mass_kept: of units that attend to all tokens, which keep 1, and of those that select.
        selected_mass_kept: of units that select.
        exact_units, selecting_units: how many there were of both.
        gathered_units: that attend to a selection which a GPU fetched. They are in none of the
            means.
        head_probes: int64 [num_layers, num_kv_heads].
        head_mass_kept: float64 of the same shape, NaN where a head was not probed.
        head_low, head_high: bounds for each head by itself.
        worst_head: None: none was probed.
    """

    probes: int
    mass_kept: MassKept
    selected_mass_kept: MassKept
    exact_units: int
    selecting_units: int
    gathered_units: int
    head_probes: npt.NDArray[np.int64]
    head_mass_kept: FloatArray
    head_low: FloatArray
    head_high: FloatArray
    worst_head: WorstHead | None
    confidence: float = CONFIDENCE


def quality_of(attention: DecodeAttention) -> Quality:
    """What the probes of `attention` found so far.

    Raises:
        ValueError: there are none.
    """
    if not attention.is_probed:
        raise ValueError(
            "quality_probe is 0: nothing is compared with exact attention; load the model with "
            "quality_probe=0.001"
        )
    counts, sums = attention.probed()
    decoded = attention.decoded
    low, high = mass_bounds(counts, sums, error=1.0 - CONFIDENCE)
    selected = _mass_kept(counts.sum(), sums.sum(), error=1.0 - CONFIDENCE)
    return Quality(
        probes=int(counts.sum()),
        mass_kept=_with_exact(selected, decoded.exact, decoded.selecting),
        selected_mass_kept=selected,
        exact_units=decoded.exact,
        selecting_units=decoded.selecting,
        gathered_units=decoded.gathered,
        head_probes=counts,
        head_mass_kept=np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0),
        head_low=low,
        head_high=high,
        worst_head=_worst_head(counts, sums),
    )


def mass_bounds(
    counts: npt.ArrayLike, sums: npt.ArrayLike, *, error: float
) -> tuple[FloatArray, FloatArray]:
    """Bounds of the mean of which `counts` numbers in [0, 1] with these `sums` were drawn.

    Chernoff's bound in the form of Hoeffding (1963, theorem 1): those means m of a distribution or,
    drawn without replacement (section 6), of a finite number of units, for which
    n kl(mean of the drawn, m) <= ln(2 / error), where kl is that of two coins. Near 1, where masses
    are, it is much narrower than Hoeffding's square root.

    Args:
        error: the chance that one of the two bounds is wrong.

    Returns:
        low, high in the shape of `counts`; 0 and 1 where that is 0.
    """
    n = np.asarray(counts, np.float64)
    mean = np.clip(np.asarray(sums, np.float64) / np.maximum(n, 1.0), 0.0, 1.0)
    limit = math.log(2.0 / error) / np.maximum(n, 1.0)

    def outermost(end: float) -> FloatArray:
        """The last m towards `end` within the limit, by bisection; rounded outwards."""
        inside, outside = mean.copy(), np.full_like(mean, end)
        for _ in range(60):
            middle = (inside + outside) / 2
            within = _kl_of_coins(mean, middle) <= limit
            inside = np.where(within, middle, inside)
            outside = np.where(within, outside, middle)
        return np.where(n == 0, end, outside)

    return outermost(0.0), outermost(1.0)


def _kl_of_coins(p: FloatArray, q: FloatArray) -> FloatArray:
    """KL(Bernoulli(p) || Bernoulli(q)) in nats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(p > 0, p * np.log(p / q), 0.0)
        tails = np.where(p < 1, (1 - p) * np.log((1 - p) / (1 - q)), 0.0)
    return heads + tails


def _mass_kept(count: Any, total: Any, *, error: float) -> MassKept:
    low, high = mass_bounds(count, total, error=error)
    return MassKept(float(total / count) if count else None, float(low), float(high))


def _with_exact(selected: MassKept, exact: int, selecting: int) -> MassKept:
    """The mass kept when `exact` units that keep all of it count, too."""
    if exact + selecting == 0:
        return MassKept(None, 0.0, 1.0)
    share = selecting / (exact + selecting)
    mean = 1.0 if share == 0.0 else None
    if share and selected.mean is not None:
        mean = 1.0 - share * (1.0 - selected.mean)
    return MassKept(mean, 1.0 - share * (1.0 - selected.low), 1.0 - share * (1.0 - selected.high))


def _worst_head(counts: npt.NDArray[np.int64], sums: FloatArray) -> WorstHead | None:
    if not counts.any():
        return None
    low, high = mass_bounds(counts, sums, error=(1.0 - CONFIDENCE) / counts.size)
    means = np.divide(sums, counts, out=np.full(counts.shape, np.inf), where=counts > 0)
    worst = int(np.lexsort((means.flat, high.flat))[0])  # those never probed have 1 and 1
    layer_idx, kv_head = divmod(worst, counts.shape[1])
    mass_kept = MassKept(float(means.flat[worst]), float(low.flat[worst]), float(high.flat[worst]))
    return WorstHead(layer_idx, kv_head, int(counts.flat[worst]), mass_kept)


class FloorWatch:
    """Warns once, when the attention mass kept is surely below `floor`.

    It looks when the number of probes has doubled, and each look takes its part of the error, so
    that all of them together warn wrongly with a chance below 1 - CONFIDENCE.
    """

    def __init__(self, attention: DecodeAttention, floor: float) -> None:
        self._attention, self._floor = attention, floor
        self._next_probes, self._looks = _FIRST_LOOK, 0
        self._warned = False

    def look(self) -> None:
        """After each step."""
        if self._warned or self._attention.num_probed() < self._next_probes:
            return
        counts, sums = self._attention.probed()
        count = int(counts.sum())
        self._next_probes = 2 * count
        self._looks += 1
        error = (1.0 - CONFIDENCE) / (self._looks * (self._looks + 1))
        decoded = self._attention.decoded
        selected = _mass_kept(count, sums.sum(), error=error)
        kept = _with_exact(selected, decoded.exact, decoded.selecting)
        if kept.high >= self._floor:
            return
        self._warned = True
        logger.warning(
            "policy %r keeps at most %.1f %% of the attention mass (%.1f %% in %d probes), less "
            "than quality_floor=%g: raise its budget_tokens, or take another policy",
            self._attention.policy.name,
            100 * kept.high,
            100 * (kept.mean or 0.0),
            count,
            self._floor,
        )
