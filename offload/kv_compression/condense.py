"""Which tokens of a sequence stay, and the few that take the place of the others.

HARD-KV (arXiv 2606.28831, appendix) merges what it evicts so that the log-sum-exp of attention is
preserved: a token that stands for a run of others must weigh as much as they do together. Here its
key is fitted to that: over the last queries, and over these as later tokens would ask them, the
logit of the condensed key comes as close to the log-sum-exp of the run as a ridge regression gets.
No kernel knows of it, and it can be condensed again. Time and memory grow with slots times queries,
not with slots times runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from offload.kv_compression.bound import SequenceBound

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
    """What becomes of KV heads.

    Attributes:
        kept: int32 [num_heads, num_left - new], slots that stay, ascending.
        keys, values: [num_heads, new, head_dim], of the slots that come after the first
            `before_new`.
    """

    kept: Tensor
    keys: Tensor
    values: Tensor


def condense(
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    split: Split,
) -> Condensed:
    """KV heads of one layer, all in float32.

    Args:
        keys, values: [num_heads, num_slots, head_dim].
        queries: [num_heads, n, head_dim] of their query heads, rotated, times the softmax scale.
    """
    masses = keys @ queries.mT  # [num_heads, num_slots, n]
    most = masses.amax(dim=1, keepdim=True)
    masses.sub_(most).exp_()
    of_query = (masses.sum(dim=1) * queries.shape[1]).reciprocal_()
    # Head by head, as a product of all is not bit for bit that of one.
    weights = torch.stack([x @ of for x, of in zip(masses, of_query, strict=True)])
    goes = _goes(weights * values.norm(dim=2), split)
    kept = _slots(~goes).int()
    if not split.new:
        empty = keys.new_empty(len(keys), 0, keys.shape[2])
        return Condensed(kept, empty, empty)
    runs = _Runs.of(_slots(goes), split)
    sums = runs.sum(masses)
    is_nothing = sums < torch.finfo(sums.dtype).tiny  # their log-sum-exp is not known
    run_lse = sums.log_().add_(most)
    weights += _LEAST_WEIGHT
    of_runs = runs.sum(weights[:, :, None])
    means, run_values = (runs.sum(x, weights).div_(of_runs) for x in (keys, values))
    missing = (run_lse - means @ queries.mT).masked_fill_(is_nothing, 0.0)
    means += _correction(queries, missing)
    return Condensed(kept, means, run_values)


@dataclass(frozen=True)
class _Runs:
    """Runs of neighbours among the slots that go; a head's runs differ by one token at most.

    Attributes:
        slots: int64 [num_heads * those that go of one], of all heads' slots.
        starts: int64 [num_heads * new], of runs in `slots`.
    """

    slots: Tensor
    starts: Tensor

    @classmethod
    def of(cls, others: Tensor, split: Split) -> _Runs:
        """The runs of slots [num_heads, those that go], ascending."""
        head = torch.arange(len(others))[:, None]
        starts = -(torch.arange(split.new) * -others.shape[1] // split.new)
        slots = others + head * split.num_slots
        return cls(slots.flatten(), (starts + head * others.shape[1]).flatten())

    def sum(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """[num_heads, new, dim] of rows [num_heads, num_slots, dim], which are not copied, times
        weights [num_heads, num_slots]."""
        of_slots = None if weights is None else weights.flatten()[self.slots]
        sums = embedding_bag(
            self.slots, rows.flatten(0, 1), self.starts, mode="sum", per_sample_weights=of_slots
        )
        return sums.view(len(rows), -1, rows.shape[2])


def _goes(scores: Tensor, split: Split) -> Tensor:
    """Whether it is not to stay, of each slot: those with the least of `scores` [num_heads, n]."""
    goes = torch.zeros_like(scores, dtype=torch.bool)
    first_exact, first_recent = split.sinks + split.condensed, split.num_slots - split.recent
    for start, stop, stay in (
        (split.sinks, first_exact, split.stay),
        (first_exact, first_recent, split.exact),
    ):
        least = scores[:, start:stop].topk(stop - start - stay, largest=False, sorted=False)
        goes[:, start:stop].scatter_(1, least.indices, True)
    return goes


def _slots(chosen: Tensor) -> Tensor:
    """[num_heads, n] ascending, of bools of which as many are set in each head."""
    return chosen.nonzero()[:, 1].view(len(chosen), -1)


def _correction(queries: Tensor, missing: Tensor) -> Tensor:
    """[heads, runs, head_dim] to add to keys whose logits lack `missing` [heads, runs, n]: ridge
    regression."""
    gram = queries.mT @ queries
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(dim=1, keepdim=True) + torch.finfo(gram.dtype).tiny
    added: Tensor = torch.linalg.solve(gram, (missing @ queries).mT).mT
    return added
