"""How many tokens heads attend to, and how many held a share of their attention.

The share is HARD-KV's top-p (arXiv 2606.28831). The attention of a head is that of its group of
query heads together, as `importance_of_units` has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload.bench.selection.observer import SeenLayer

FloatArray = npt.NDArray[np.floating]
_ROUNDING = 1e-12  # of sums of the same weights in another order, relative


@dataclass(frozen=True)
class HeadCounts:
    """One head's tokens over the steps: of a KV head, or a query head of policies that select so.

    Attributes:
        attended_p5, attended_median, attended_p95: tokens attended, of all steps.
        attended_sampled: the median of sampled steps, as all below.
        true_median: the fewest tokens with top_p of the head's exact attention, sinks and the
            recent window included, which are attended in any case.
        true_without_window: the same of any tokens.
        reached_share: of the steps, those where what was attended holds top_p.
        attended_reached, needed_mean: means of these steps: tokens attended, and the fewest of
            them that hold top_p; None where no step does.
        deviation_median, deviation_p90: of |attended / true - 1|.
    """

    layer: int
    head: int
    attended_p5: float
    attended_median: float
    attended_p95: float
    attended_sampled: float
    true_median: float
    true_without_window: float
    reached_share: float
    attended_reached: float | None
    needed_mean: float | None
    deviation_median: float
    deviation_p90: float

    @property
    def needed_share(self) -> float | None:
        """Of the tokens attended where they hold top_p, those that it needs."""
        return needed_share([self])


class _Sampled(NamedTuple):
    """A head at a sampled step, in tokens."""

    attended: int
    true: int
    without_window: int
    needed: int
    reached: bool


def fewest_tokens(weights: FloatArray, mass: float) -> int:
    """How many of the largest weights have the sum `mass`; all of them if they have less."""
    if mass <= 0:
        return 0
    sums = np.cumsum(-np.sort(-weights.astype(np.float64)))
    return min(int(np.searchsorted(sums, mass)) + 1, len(weights))


class HeadCounter:
    """Give `seen` to `SelectionObserver.on_seen`.

    Args:
        top_p: the share of a head's attention, in (0, 1].
        window: sink and recent tokens that are attended in any case.
    """

    def __init__(self, top_p: float, window: tuple[int, int]) -> None:
        self._top_p, self._window = top_p, window
        self._attended: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._sampled: dict[tuple[int, int], list[_Sampled]] = defaultdict(list)

    def seen(self, layer: SeenLayer) -> None:
        """Add one layer of a step."""
        for head, count in enumerate(layer.num_tokens):
            self._attended[layer.layer_idx, head].append(count)
            if layer.importance is not None:
                weights = layer.importance[head].astype(np.float64)
                sampled = self._sample(weights, layer.tokens[head])
                self._sampled[layer.layer_idx, head].append(sampled)

    def counted(self) -> list[HeadCounts]:
        """Of each head of each layer that was seen, at sampled steps too, in their order."""
        return [
            _counts(*place, np.array(self._attended[place]), np.array(sampled, np.float64))
            for place, sampled in sorted(self._sampled.items())
        ]

    def _sample(self, weights: FloatArray, tokens: npt.NDArray[np.int32] | None) -> _Sampled:
        kv_len, (sinks, recent) = len(weights), self._window
        attended = weights if tokens is None else weights[tokens]
        mass = self._top_p * float(weights.sum()) * (1 - _ROUNDING)
        rest = weights[sinks : max(sinks, kv_len - recent)]
        of_window = float(weights.sum()) - float(rest.sum())
        return _Sampled(
            attended=len(attended),
            true=kv_len - len(rest) + fewest_tokens(rest, mass - of_window),
            without_window=fewest_tokens(weights, mass),
            needed=fewest_tokens(attended, mass),
            reached=float(attended.sum()) >= mass,
        )


def _counts(layer: int, head: int, attended: FloatArray, sampled: FloatArray) -> HeadCounts:
    """Args: attended: [steps]; sampled: [sampled steps, fields of `_Sampled`]."""
    chosen, true, without_window, needed, reached = sampled.T
    held = reached > 0
    deviation = np.abs(chosen / np.maximum(true, 1) - 1)
    p5, median, p95 = np.percentile(attended, (5, 50, 95))
    return HeadCounts(
        layer,
        head,
        float(p5),
        float(median),
        float(p95),
        float(np.median(chosen)),
        float(np.median(true)),
        float(np.median(without_window)),
        float(reached.mean()),
        float(chosen[held].mean()) if held.any() else None,
        float(needed[held].mean()) if held.any() else None,
        float(np.median(deviation)),
        float(np.percentile(deviation, 90)),
    )


def needed_share(heads: Sequence[HeadCounts]) -> float | None:
    """Needed tokens over attended ones, sums of the heads' means; None if none reached top_p."""
    attended = sum(head.attended_reached or 0 for head in heads)
    return sum(head.needed_mean or 0 for head in heads) / attended if attended else None


def over_heads(heads: Sequence[HeadCounts]) -> dict[str, Any]:
    """Of all heads: medians by `HeadCounts`' names, and two of all heads together.

    needed_share: as the function has it.
    deviation_p90_of_heads: nine of ten heads deviate less, at the median of their steps.
    """
    if not heads:
        return {}
    rows = [asdict(head) for head in heads]
    columns = {
        name: [row[name] for row in rows if row[name] is not None]
        for name in rows[0]
        if name not in ("layer", "head")
    }
    medians = {name: float(np.median(x)) if x else None for name, x in columns.items()}
    return medians | {
        "needed_share": needed_share(heads),
        "deviation_p90_of_heads": float(np.percentile(columns["deviation_median"], 90)),
    }
