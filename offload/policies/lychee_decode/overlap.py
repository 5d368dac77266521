"""How many of a head's heaviest tokens the same head of the layer above has, too.

LycheeDecode (arXiv 2602.04541) hands tokens down head by head because this differs by head: one
that shares most of them can do with the other's, one that shares few should look for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload.models import LeanModel
from offload.models.shape import ModelShape
from offload.policies.lychee_decode.calibration import keys_of_text
from offload.policies.lychee_decode.choice import FloatArray

NUM_QUERIES = 32  # the last of a text
_MOST_BY_CHANCE = 0.75


@dataclass(frozen=True)
class HeadOverlap:
    """What was measured on a text.

    Attributes:
        shares: [num_layers - 1, num_kv_heads]; [i, h] is the share of the heaviest tokens of KV
            head h in layer i + 1 that are also among those of head h in layer i: mean of the
            queries.
        num_tokens: of the text.
        budget_tokens: how many heaviest tokens of a query are compared.
    """

    shares: FloatArray
    num_tokens: int
    budget_tokens: int

    @property
    def by_chance(self) -> float:
        """What heads share that choose so many tokens at random."""
        return float(np.mean(self.budget_tokens / np.array(_kv_lens(self.num_tokens))))

    @property
    def can_differ(self) -> bool:
        """Whether chance leaves room for heads that share more than others."""
        return self.by_chance <= _MOST_BY_CHANCE


def check_overlap(shape: ModelShape, num_tokens: int, budget_tokens: int) -> None:
    """Refuse what `head_overlap` cannot measure; errors name options of `offload inspect heads`.

    Raises:
        ValueError: a model of one layer, a text that is too long for the model, or one in which a
            query sees no more tokens than are compared.
    """
    if shape.num_layers < 2:
        raise ValueError("this model has one layer: there is none above it to compare it with")
    if budget_tokens < 1:
        raise ValueError(f"--budget-tokens {budget_tokens} must be at least 1")
    if num_tokens > shape.max_context:
        raise ValueError(
            f"a text of {num_tokens} tokens exceeds the {shape.max_context} tokens that this model "
            "reads; lower --context"
        )
    least = budget_tokens + NUM_QUERIES
    if num_tokens < least:
        raise ValueError(
            f"--budget-tokens {budget_tokens} needs a text of at least {least} tokens, got "
            f"{num_tokens}: each of its last {NUM_QUERIES} queries must see more tokens than are "
            "compared; lower it, or raise --context, or give a longer --text"
        )


def head_overlap(
    lean: LeanModel,
    input_ids: Tensor,
    budget_tokens: int,
    *,
    on_progress: Callable[[], None] = lambda: None,
) -> HeadOverlap:
    """One prefill of a text, in a KV store of its own, and the exact attention of its last queries.

    A KV head's heaviest tokens are those of the largest weight, summed over its query heads; sinks
    and the latest tokens are among them.

    Args:
        input_ids: int64 [num_tokens] or [1, num_tokens].
        on_progress: called twice for each layer: when it has been read, and when it is compared.

    Raises:
        ValueError: as `check_overlap`.
    """
    tokens, shape = input_ids.flatten(), lean.shape
    check_overlap(shape, len(tokens), budget_tokens)
    queries: list[Tensor] = []

    def keep_queries(seq: int, layer_idx: int, of_layer: Tensor, kv_len: int) -> None:
        queries.append(of_layer[:, -NUM_QUERIES:].float().clone())
        on_progress()

    shares = np.zeros((shape.num_layers - 1, shape.num_kv_heads))
    with keys_of_text(lean, tokens, keep_queries) as keys_of:
        above = None
        for layer_idx, of_layer in enumerate(queries):
            heaviest = _heaviest(of_layer, keys_of(layer_idx), lean.sm_scale, budget_tokens)
            if above is not None:
                common = (heaviest & above).sum(-1).double().mean(0)
                shares[layer_idx - 1] = (common / budget_tokens).cpu().numpy()
            above = heaviest
            on_progress()
    return HeadOverlap(shares, len(tokens), budget_tokens)


def _heaviest(queries: Tensor, keys: Tensor, sm_scale: float, count: int) -> Tensor:
    """bool [NUM_QUERIES, num_kv_heads, num_tokens]: a query's tokens of the largest weight.

    Args:
        queries: float32 [num_qo_heads, NUM_QUERIES, head_dim], of the last tokens.
        keys: [num_kv_heads, num_tokens, head_dim].
    """
    num_kv_heads, num_tokens, head_dim = keys.shape
    groups = queries.view(num_kv_heads, -1, NUM_QUERIES, head_dim)
    columns = keys.float().transpose(1, 2)
    size = (NUM_QUERIES, num_kv_heads, num_tokens)
    heaviest = torch.zeros(size, dtype=torch.bool, device=keys.device)
    for i, kv_len in enumerate(_kv_lens(num_tokens)):
        scores = sm_scale * groups[:, :, i] @ columns[:, :, :kv_len]
        weights = scores.double().softmax(-1).sum(1)  # in float32 far tokens would all weigh zero
        heaviest[i].scatter_(1, weights.topk(count).indices, True)
    return heaviest


def _kv_lens(num_tokens: int) -> range:
    """Tokens that the last queries see."""
    return range(num_tokens - NUM_QUERIES + 1, num_tokens + 1)
