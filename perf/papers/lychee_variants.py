"""LycheeCluster by its paper's rule, and the variants that its figures compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from offload.policies import Policy
from offload.policies.base import BuildContext, State
from offload.policies.lychee_cluster import LycheeCluster
from offload.policies.registry import make_policy

BUDGETS = (256, 512, 1024, 2048)
CHUNKS_PER_CLUSTER = (1, 2, 4, 8)
_FIXED: dict[str, Any] = {
    "min_chunk_tokens": 16,
    "max_chunk_tokens": 16,
}  # no delimiter can end a chunk


@dataclass(frozen=True)
class AsPublished(LycheeCluster):
    """Clusters ranked by Eq. 2 of their chunks' keys; all tokens of the best ones are attended.

    Chunks that are grafted while decoding have mean keys whatever the pooling: what is measured of
    "max" is short enough to graft none.

    Args:
        pooling: of a chunk's keys into its own: "mean" or "max".
    """

    builds_on_device: ClassVar[bool] = False

    paper: bool = True
    min_chunk_tokens: int = 8
    max_chunk_tokens: int = 16
    pooling: str = "mean"

    def build(self, context: BuildContext) -> State:
        if self.pooling == "max":
            starts = self._index_shape(context).starts
            context = replace(context, keys=with_chunk_maxima(context.keys, starts))
        return super().build(context)


def with_chunk_maxima(keys: Tensor, starts: np.ndarray) -> Tensor:
    """Keys [num_kv_heads, kv_len, head_dim], each of a chunk replaced by the chunk's maxima.

    Their mean is then the max-pooled key of the chunk.
    """
    lengths = torch.from_numpy(np.diff(starts))
    chunk_of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    inside = keys[:, starts[0] : starts[-1]]
    index = chunk_of_token[None, :, None].expand_as(inside)
    maxima = keys.new_full((len(keys), len(lengths), keys.shape[2]), -torch.inf)
    maxima.scatter_reduce_(1, index, inside, "amax")
    pooled = keys.clone()
    pooled[:, starts[0] : starts[-1]] = maxima.gather(1, index)
    return pooled


def variants() -> dict[str, Policy]:
    """By label, full attention first and then those that answer questions, too."""
    of_both: dict[str, type[LycheeCluster]] = {"published": AsPublished, "ours": LycheeCluster}
    made: dict[str, Policy] = {"full": make_policy("full")}
    for name, kind in of_both.items():
        made[f"{name} fixed chunks"] = kind(**_FIXED)
        made |= {f"{name} {budget}": kind(budget_tokens=budget) for budget in BUDGETS[:-1]}
    made["published max"] = AsPublished(pooling="max")
    for name, kind in of_both.items():
        made[f"{name} {BUDGETS[-1]}"] = kind(budget_tokens=BUDGETS[-1])
    made |= {
        f"published {n} per cluster": AsPublished(chunks_per_cluster=n)
        for n in CHUNKS_PER_CLUSTER
        if n != LycheeCluster.chunks_per_cluster
    }
    return made


def answering() -> list[str]:
    """The first of `variants`, which answer questions: the others would take as long again."""
    labels = list(variants())
    return labels[: labels.index("published max") + 1]
