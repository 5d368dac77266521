"""The answer's tokens with gates between full and sparse attention, so that gates can learn.

As in decoding: the prompt has been read exactly, and only the tokens of the answer are sparse. A
head's set of tokens is a mask of weights in [0, 1]: what it hands down is its own top tokens by z,
and by 1 - z what it has inherited. So a gate also learns by what the heads below it lose or gain.
With gates of 0 and 1 it is what `LycheeDecode` computes.

The stock model of transformers computes it, whose layers have gradients; its attention is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offload.models.shape import ModelShape
from offload.training.mixed_attention import ReadText, SparseRule, heaviest, masks

_ATTENTION = "offload_mixed_heads"


def activation_bytes(shape: ModelShape, itemsize: int, rows: int, num_tokens: int) -> int:
    """What the gradient of the gates needs of all layers, if nothing is computed again.

    Each layer after layer 0 keeps four arrays [rows, num_qo_heads, num_tokens]: all weights, those
    of inherited tokens and these normed, in float32, and their mixture in the model's dtype; and
    two float32 ones [rows, num_kv_heads, num_tokens]: its own tokens and what it hands down. What
    has no num_tokens, or no rows, is small beside these.

    Args:
        itemsize: bytes of an element of the model's dtype.
        rows: tokens of all answers together.
        num_tokens: of a prompt and its answer.
    """
    weights = shape.num_qo_heads * (3 * 4 + itemsize) + shape.num_kv_heads * 2 * 4
    return (shape.num_layers - 1) * rows * num_tokens * weights


def prepare_stock(stock: Any, *, recompute: bool = True) -> None:
    """Have a stock model attend by `MixedHeads` and keep its weights.

    Args:
        recompute: keep the activations of only one layer at a time for the gradient of the gates,
            and compute those of the others again.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attend)
    stock.set_attn_implementation(_ATTENTION)
    stock.requires_grad_(False)
    if not recompute:
        return
    for layer in stock.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )
    stock.train()  # or nothing is checkpointed


def mixed_hidden(stock: Any, text: ReadText, gates: Tensor, rule: SparseRule) -> Tensor:
    """Hidden states [batch, num_answer, hidden_size] behind the answer's tokens, normed.

    Args:
        stock: after `prepare_stock`.
        gates: [num_layers, num_kv_heads] in [0, 1]; those of layer 0 have to be 1.
    """
    num_prompt, num_tokens = text.num_prompt, text.tokens.shape[1]
    positions = torch.arange(num_prompt, num_tokens, device=text.tokens.device)[None]
    hidden: Tensor = stock.model(
        input_ids=text.tokens[:, num_prompt:],
        position_ids=positions,
        use_cache=False,
        mixed_heads=MixedHeads(text, gates, rule),
    ).last_hidden_state
    return hidden


@dataclass
class MixedHeads:
    """Attention of one pass over the answer.

    Attributes:
        handed_down: by layer, float32 [batch, num_kv_heads, num_answer, num_tokens] in [0, 1].
    """

    text: ReadText
    gates: Tensor
    rule: SparseRule
    handed_down: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._future, self._always = masks(self.text, self.rule)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
        """o [batch, num_qo_heads, num_answer, head_dim] of the answer's q, k and v, rotated."""
        k = torch.cat([self.text.keys[layer_idx], k], dim=2)
        v = torch.cat([self.text.values[layer_idx], v], dim=2)
        q = q.reshape(
            len(q), k.shape[1], -1, *q.shape[2:]
        )  # [batch, num_kv_heads, group_size, n, head_dim]
        scores = sm_scale * (q @ k[:, :, None].transpose(-1, -2)).float()
        full = scores.masked_fill(self._future, -torch.inf).softmax(-1)
        z = self.gates[layer_idx].view(-1, 1, 1)
        own = heaviest(full.detach().sum(2), self._always, self.rule).float()
        if layer_idx == 0:
            mixed, handed_down = full, own
        else:
            inherited = self.handed_down[layer_idx - 1]
            kept = full * inherited[:, :, None]
            sparse = kept / kept.sum(-1, keepdim=True).clamp(min=1e-30)
            mixed = z[..., None] * full + (1 - z[..., None]) * sparse
            handed_down = z * own + (1 - z) * inherited
        # A layer that is computed again, for its gradient, finds what it had inherited before.
        self.handed_down.setdefault(layer_idx, handed_down)
        return (mixed.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    mixed_heads: MixedHeads,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' `AttentionInterface` calls it."""
    o = mixed_heads.attend(module.layer_idx, query, key, value, scaling)
    return o.transpose(1, 2), None
