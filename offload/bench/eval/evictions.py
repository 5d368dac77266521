"""What leaves a sequence with a bound: `condense`, and the evictions that it is compared with.

SnapKV (Li et al., arXiv 2404.14469) and R-KV (Cai et al., arXiv 2505.24133) say which tokens of a
KV head stay by scores of their own, and drop the others. Here they have what `condense` has: keys
as they are cached, sinks and recent tokens that stay in any case, and the same slots when a
sequence is full. They see fewer queries: of the window's, those of recent tokens where they were
asked, `_SPACING` tokens apart, three of 64 tokens; `condense` sees the others, too, which are
turned to where later tokens would ask them. A window that was taken back, where keys stand in for
queries, is not for them: a text that is decoded has none.

To compare, their scores can also choose what is merged (HARD-KV, Figure 21).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.kv_compression.bound import CONDENSED_SHARE
from offload.kv_compression.by_attention import AHEAD, CompressionByAttention
from offload.kv_compression.condense import Condensed, Split, condense
from offload.kv_compression.window import SPACING

if TYPE_CHECKING:
    from offload.runtime.runtime import Runtime

KERNEL_SIZE = 7  # of pooling over neighbours: R-KV's, and one of SnapKV's
# R-KV: the weight of importance, and from which cosine on keys are alike.
IMPORTANCE_WEIGHT = 0.1
LEAST_SIMILARITY = 0.5
_SPACING = SPACING * len(AHEAD)  # tokens, of queries where they were asked
_ROWS_AT_A_TIME = 1024  # of cosines of all keys


def snapkv_scores(keys: Tensor, queries: Tensor, split: Split, *, group_size: int) -> Tensor:
    """Attention of the recent tokens' queries to the slots before these, a maximum over neighbours
    (SnapKV, Listing 1).

    Args:
        keys: [num_slots, head_dim] of one KV head.
        queries: [n, head_dim], as `condense` gets them; those at later positions do not count.
        group_size: query heads of the KV head; they are added up.

    Returns:
        [num_slots].
    """
    recent = _recent_queries(queries, split, group_size)
    behind = _SPACING * torch.arange(recent.shape[1] - 1, -1, -1)  # the newest token
    is_later = torch.arange(split.num_slots) >= split.num_slots - behind[:, None]
    weights = (recent @ keys.T).masked_fill_(is_later, -torch.inf).softmax(-1).sum((0, 1))
    return F.pad(_pooled(weights[: split.num_slots - split.recent]), (0, split.recent))


def rkv_scores(keys: Tensor, queries: Tensor, split: Split, *, group_size: int) -> Tensor:
    """Importance less redundancy (R-KV, section 3), each from a softmax.

    Importance: attention among slots before the recent ones, of the largest logit of the query
    heads, a maximum over neighbours. Redundancy: softmax of a key's mean cosine with all keys; of
    those that are alike, the last is not redundant for the others.

    Args, returns: as of `snapkv_scores`.
    """
    old = split.num_slots - split.recent
    logits = (_recent_queries(queries, split, group_size) @ keys[:old].T).amax(0)
    importance = _pooled(logits.softmax(-1).mean(0))
    redundancy = mean_similarity(keys).softmax(-1)[:old]
    scores = IMPORTANCE_WEIGHT * importance - (1 - IMPORTANCE_WEIGHT) * redundancy
    return F.pad(scores, (0, split.recent))


def mean_similarity(keys: Tensor) -> Tensor:
    """[n] of keys [n, head_dim]: of each, the mean cosine with all, 0 with itself and with those to
    which it is the last that is alike."""
    units, positions = F.normalize(keys, dim=1), torch.arange(len(keys), dtype=torch.int32)
    total = keys.new_zeros(len(keys))
    for start in range(0, len(keys), _ROWS_AT_A_TIME):
        cosines = units[start : start + _ROWS_AT_A_TIME] @ units.T
        cosines[:, start:].fill_diagonal_(0.0)
        last = positions.where(cosines > LEAST_SIMILARITY, -1).amax(1)
        alike = (last >= 0).nonzero().squeeze(1)
        cosines[alike, last[alike].long()] = 0.0
        total += cosines.sum(0)
    return total / len(keys)


def _recent_queries(queries: Tensor, split: Split, group_size: int) -> Tensor:
    """[group_size, n, head_dim] of the recent tokens, where they were asked."""
    of_heads = queries.view(group_size, -1, queries.shape[1])
    as_asked = of_heads.flip(1)[:, :: len(AHEAD)].flip(1)  # the newest is
    return as_asked[:, -max(1, math.ceil(split.recent / _SPACING)) :]


def _pooled(weights: Tensor) -> Tensor:
    pooled = F.max_pool1d(weights[None], KERNEL_SIZE, stride=1, padding=KERNEL_SIZE // 2)
    return pooled[0]


@dataclass(frozen=True)
class Eviction:
    """What becomes of the tokens of a full sequence.

    Attributes:
        scores: say which stay; None: those of `condense`.
        merges: what does not stay becomes a few condensed tokens; else it is dropped.
        fits: keys of condensed tokens are fitted to the log-sum-exp; else they are means.
        condense_by: of `RuntimeConfig`; what reconstruction finds has scores of its own, and the
            rest is dropped.
    """

    scores: Callable[..., Tensor] | None = None
    merges: bool = True
    fits: bool = True
    condense_by: str = "attention"

    @property
    def options(self) -> dict[str, Any]:
        """Options of `RuntimeConfig` for a model with host_bytes_per_sequence."""
        if self.condense_by == "reconstruction":  # which has no use for a share
            return {"condense_by": self.condense_by, "condensed_share": CONDENSED_SHARE}
        return {"condense_by": self.condense_by} | ({} if self.merges else {"condensed_share": 0.0})

    def condense_heads(self, group_size: int) -> Callable[..., Condensed]:
        """For `CompressionByAttention.condense_heads`; one without condensed slots drops."""
        scores = self.scores and functools.partial(self.scores, group_size=group_size)
        return functools.partial(condense, fits=self.fits, scores=scores)


EVICTIONS = {
    "reread": Eviction(merges=False, condense_by="reconstruction"),
    "fitted": Eviction(),
    "means": Eviction(fits=False),
    "dropped": Eviction(merges=False),
    "snapkv": Eviction(snapkv_scores, merges=False),
    "rkv": Eviction(rkv_scores, merges=False),
    "snapkv-fitted": Eviction(snapkv_scores),
    "rkv-fitted": Eviction(rkv_scores),
}


AUTO = "auto"  # not one of them: what a runtime does by itself


def eviction_options(name: str) -> dict[str, Any]:
    """Options of `RuntimeConfig` for one of `EVICTIONS` or AUTO, without
    host_bytes_per_sequence."""
    return {} if name == AUTO else EVICTIONS[name].options


def use_eviction(runtime: Runtime, name: str) -> None:
    """Have the sequences of a runtime with a bound, which has its `eviction_options`, condensed as
    one of `EVICTIONS` or AUTO says."""
    compression, attention = runtime.sequences.compression, runtime.attention
    if name == AUTO or EVICTIONS[name].condense_by == "reconstruction":
        return
    assert isinstance(compression, CompressionByAttention)
    group_size = attention.num_qo_heads // attention.store.num_kv_heads
    compression.condense_heads = EVICTIONS[name].condense_heads(group_size)
