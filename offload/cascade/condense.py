"""Which tokens of a sequence stay, and the few that take the place of the others.

HARD-KV (arXiv 2606.28831, appendix) merges what it evicts so that the log-sum-exp of attention is
preserved: a token that stands for a run of others must weigh as much as they do together. Here its
key is fitted to that: over the last queries, and over these as later tokens would ask them, the
logit of the condensed key comes as close to the log-sum-exp of the run as a ridge regression gets.
No kernel knows of it, and it can be condensed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.cascade.bound import SequenceBound

RIDGE = 10.0  # of the mean square of an element of the queries; with less, some find too much
_LEAST_WEIGHT = 1e-20  # a run that no query asks for has a mean, too


@dataclass(frozen=True)
class Split:
    """Slots of a sequence before and after: [sinks | condensed | exact | recent].

    Attributes:
        num_slots, condensed: before.
        stay: condensed ones that stay as they are.
        new: slots for all that does not stay.
        num_left: slots after.
    """

    num_slots: int
    sinks: int
    recent: int
    condensed: int
    stay: int
    new: int
    num_left: int

    @classmethod
    def of(cls, bound: SequenceBound, num_slots: int, condensed: int) -> Split:
        """To `bound.low` slots from more."""
        new = bound.new_condensed
        stay = min(bound.condensed, condensed + new) - new
        sizes = (bound.sinks, bound.recent, condensed, stay, new, bound.low)
        return cls(num_slots, *sizes)

    @property
    def exact(self) -> int:
        """Slots between condensed and recent ones that stay."""
        return self.num_left - self.sinks - self.stay - self.new - self.recent

    @property
    def before_new(self) -> int:
        """Slots before the new ones."""
        return self.sinks + self.stay


@dataclass(frozen=True)
class Condensed:
    """What becomes of one KV head.

    Attributes:
        kept: int32 [num_left - new], slots that stay, ascending.
        keys, values: [new, head_dim], of the slots that come after the first `before_new`.
    """

    kept: Tensor
    keys: Tensor
    values: Tensor


def condense(
    keys: Tensor, values: Tensor, queries: Tensor, split: Split, *, fits: bool = True
) -> Condensed:
    """One KV head, all in float32.

    Args:
        keys, values: [num_slots, head_dim].
        queries: [n, head_dim] of its query heads, rotated, times the softmax scale.
        fits: False leaves the keys of runs at their weighted means (to compare).
    """
    # [num_slots, n]: the queries of a slot are neighbours, as the slots of a run are gathered.
    masses = keys @ queries.T
    most = masses.amax(dim=0)
    masses.sub_(most).exp_()
    weights = masses @ masses.sum(dim=0).reciprocal_() / len(queries)
    kept, others = _chosen(weights * values.norm(dim=1), split)
    if not split.new:
        empty = keys.new_empty(0, keys.shape[1])
        return Condensed(kept.int(), empty, empty)
    # Runs of neighbours, all as long but for one token.
    run = torch.arange(len(others)) * split.new // len(others)
    sums = masses.new_zeros(split.new, len(queries)).index_add_(0, run, masses[others])
    is_nothing = sums < torch.finfo(sums.dtype).tiny  # their log-sum-exp is not known
    run_lse = sums.log_().add_(most)
    shares = weights[others] + _LEAST_WEIGHT
    shares /= shares.new_zeros(split.new).index_add_(0, run, shares)[run]
    means, run_values = (
        x.new_zeros(split.new, x.shape[1]).index_add_(0, run, shares[:, None] * x[others])
        for x in (keys, values)
    )
    if fits:
        missing = (run_lse - means @ queries.T).masked_fill_(is_nothing, 0.0)
        means += _correction(queries, missing)
    return Condensed(kept.int(), means, run_values)


def _chosen(scores: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """Slots that stay, and the others, both ascending."""
    stays = torch.zeros(split.num_slots, dtype=torch.bool)
    stays[: split.sinks] = stays[split.num_slots - split.recent :] = True
    first_exact = split.sinks + split.condensed
    tiers = (
        (split.sinks, first_exact, split.stay),
        (first_exact, split.num_slots - split.recent, split.exact),
    )
    for start, stop, count in tiers:
        stays[scores[start:stop].topk(count).indices + start] = True
    return stays.nonzero().squeeze(1), (~stays).nonzero().squeeze(1)


def _correction(queries: Tensor, missing: Tensor) -> Tensor:
    """[runs, head_dim] to add to keys whose logits lack `missing` [runs, n]: ridge regression."""
    gram = queries.T @ queries
    gram.diagonal().add_(RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny)
    added: Tensor = torch.linalg.solve(gram, missing @ queries, left=False)
    return added
