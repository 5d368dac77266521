"""How many tokens heads attend to, and how many held a share of their attention.

The share is HARD-KV's top-p (arXiv 2606.28831); what of a selection was needed for it is the
paper's utilisation (Figure 9). The attention of a head is that of its group of query heads
together, as `importance_of_units` has it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload.bench.selection.observer import SeenLayer

FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True)
class HeadCounts:
    """One head's tokens over the steps: of a KV head, or a query head of policies that select so.

    Attributes:
        attended_p5, attended_median, attended_p95: tokens attended, of all steps.
        attended_sampled: the median of sampled steps, as all below.
        true_median: the fewest tokens with top_p of the head's exact attention, sinks and the
            recent window included, which are attended in any case.
        true_without_window: the same of any tokens.
        utilisation: median share of the attended tokens that top_p needs; all of them where they
            hold less.
        reached_share: of the steps, those where what was attended holds top_p.
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
    utilisation: float
    reached_share: float
    deviation_median: float
    deviation_p90: float


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
        mass = self._top_p * float(weights.sum())
        rest = weights[sinks : max(sinks, kv_len - recent)]
        of_window = float(weights.sum()) - float(rest.sum())
        return _Sampled(
            attended=len(attended),
            true=kv_len - len(rest) + fewest_tokens(rest, mass - of_window),
            without_window=fewest_tokens(weights, mass),
            needed=fewest_tokens(attended, mass),
            # A selection of all tokens in another order has a sum that rounds otherwise.
            reached=float(attended.sum()) >= mass * (1 - 1e-12),
        )


def _counts(layer: int, head: int, attended: FloatArray, sampled: FloatArray) -> HeadCounts:
    """Args: attended: [steps]; sampled: [sampled steps, fields of `_Sampled`]."""
    chosen, true, without_window, needed, reached = sampled.T
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
        float(np.median(needed / np.maximum(chosen, 1))),
        float(reached.mean()),
        float(np.median(deviation)),
        float(np.percentile(deviation, 90)),
    )


def over_heads(heads: list[HeadCounts]) -> dict[str, Any]:
    """Of all heads: medians by `HeadCounts`' names, and two of all heads together.

    utilisation_of_all: what top-p needs, of all tokens that are attended to.
    deviation_p90_of_heads: nine of ten heads deviate less, at the median of their steps.
    """
    if not heads:
        return {}
    rows = [asdict(head) for head in heads]
    names = [name for name in rows[0] if name not in ("layer", "head")]
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    attended = columns["attended_sampled"]
    return {name: float(np.median(column)) for name, column in columns.items()} | {
        "utilisation_of_all": float(columns["utilisation"] @ attended / max(attended.sum(), 1)),
        "deviation_p90_of_heads": float(np.percentile(columns["deviation_median"], 90)),
    }
