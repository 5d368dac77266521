"""The answer's tokens with gates between full and sparse attention, so that gates can learn.

As in decoding: the prompt has been read exactly, and only the tokens of the answer are sparse. A
head's set of tokens is a mask of weights in [0, 1]: what it publishes is its own top tokens by z,
and by 1 - z what it has inherited. So a gate also learns by what the heads below it lose or gain.
With gates of 0 and 1 it is what `LycheeDecode` computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from offload.models import DecoderLayer, LeanModel


@dataclass(frozen=True)
class SparseRule:
    """What a head publishes: `budget_tokens` of largest weight, sinks and recent ones among them.

    Attributes:
        shared: all KV heads of a layer publish one set, by the sum of their weights (TidalDecode).
    """

    budget_tokens: int
    sink_tokens: int = 4
    recent_tokens: int = 64
    shared: bool = False


@dataclass(frozen=True)
class ReadText:
    """A batch of prompts with their answers, read with full attention.

    Attributes:
        tokens: int64 [batch, num_prompt + num_answer]; shorter answers are padded at their end.
        num_prompt: tokens of each prompt.
        answered: bool [batch, num_answer], False for padding.
        keys, values: of each layer [batch, num_kv_heads, num_prompt, head_dim], rotated.
        logits: float32 [batch, num_answer, vocabulary] behind each token of the answer.
    """

    tokens: Tensor
    num_prompt: int
    answered: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor


@torch.no_grad()
def read_text(lean: LeanModel, tokens: Tensor, num_prompt: int, answered: Tensor) -> ReadText:
    """Read [batch, num_tokens] with full attention, each sequence from position 0."""
    x = lean.embed_tokens(tokens)
    tables = _rotary_tables(lean, x, 0)
    keys, values = [], []
    for layer in lean.layers:
        q, k, v = _project(lean, layer, x, tables)
        keys.append(k[:, :, :num_prompt].clone())
        values.append(v[:, :, :num_prompt].clone())
        o = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=lean.sm_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = _add_outputs(layer, x, o)
    logits = lean.lm_head(lean.final_norm(x[:, num_prompt:])).float()
    return ReadText(tokens, num_prompt, answered, keys, values, logits)


def mixed_logits(lean: LeanModel, text: ReadText, gates: Tensor, rule: SparseRule) -> Tensor:
    """Logits as `ReadText.logits`, of attention that is full where a head's gate is 1.

    Activations of one layer at a time are kept for the gradient (gradient checkpointing).

    Args:
        gates: [num_layers, num_kv_heads] in [0, 1]; layer 0 has to have ones.
    """
    x = lean.embed_tokens(text.tokens[:, text.num_prompt :])
    tables = _rotary_tables(lean, x, text.num_prompt)
    num_answer, num_tokens = x.shape[1], text.tokens.shape[1]
    last = torch.arange(text.num_prompt, num_tokens, device=x.device)[:, None]
    token = torch.arange(num_tokens, device=x.device)
    future = token > last
    always = ((token < rule.sink_tokens) | (token > last - rule.recent_tokens)) & ~future
    inherited = always.float().expand(len(x), lean.shape.num_kv_heads, num_answer, num_tokens)
    learns = gates.requires_grad
    for layer_idx, layer in enumerate(lean.layers):
        arguments = (lean, layer, text.keys[layer_idx], text.values[layer_idx], tables)
        masks = (future, always, rule)
        if learns:
            x, inherited = checkpoint(
                _mixed_layer, *arguments, *masks, x, inherited, gates[layer_idx],
                use_reentrant=False,
            )  # fmt: skip
        else:
            x, inherited = _mixed_layer(*arguments, *masks, x, inherited, gates[layer_idx])
    logits: Tensor = lean.lm_head(lean.final_norm(x)).float()
    return logits


def _mixed_layer(
    lean: LeanModel,
    layer: DecoderLayer,
    keys: Tensor,
    values: Tensor,
    tables: tuple[Tensor, Tensor],
    future: Tensor,
    always: Tensor,
    rule: SparseRule,
    x: Tensor,
    inherited: Tensor,
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """(x, what its heads publish) behind one layer.

    Args:
        future, always: bool [num_answer, num_tokens]: may not be, and is always attended to.
        inherited: [batch, num_kv_heads, num_answer, num_tokens].
        gates: [num_kv_heads].
    """
    q, k, v = _project(lean, layer, x, tables)
    k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    num_kv_heads = k.shape[1]
    q = q.unflatten(1, (num_kv_heads, -1))  # [batch, num_kv_heads, group_size, n, head_dim]
    scores = lean.sm_scale * (q @ k[:, :, None].transpose(-1, -2)).float()
    full = scores.masked_fill(future, -torch.inf).softmax(-1)
    z = gates.view(-1, 1, 1, 1)
    kept = full * inherited[:, :, None]
    sparse = kept / kept.sum(-1, keepdim=True).clamp(min=1e-30)
    mixed = z * full + (1 - z) * sparse
    o = mixed.to(v.dtype) @ v[:, :, None]
    z = gates.view(-1, 1, 1)
    published = z * _top_tokens(full.detach().sum(2), always, rule) + (1 - z) * inherited
    return _add_outputs(layer, x, o.flatten(1, 2)), published


def _top_tokens(importance: Tensor, always: Tensor, rule: SparseRule) -> Tensor:
    """1.0 where a head publishes, of weights [batch, num_kv_heads, n, num_tokens]."""
    if rule.shared:
        importance = importance.sum(1, keepdim=True).expand_as(importance)
    chosen = always.float().expand_as(importance).clone()
    room = rule.budget_tokens - rule.sink_tokens - rule.recent_tokens
    if room > 0:
        found = importance.masked_fill(always, -1.0).topk(min(room, importance.shape[-1])).indices
        chosen.scatter_(-1, found, 1.0)
    return chosen


def _rotary_tables(lean: LeanModel, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(first, first + x.shape[1], device=x.device)[None]
    cos, sin = lean.rotary_emb(x, positions)
    return cos, sin


def _project(
    lean: LeanModel, layer: DecoderLayer, x: Tensor, tables: tuple[Tensor, Tensor]
) -> Iterator[Tensor]:
    """q, k (rotated), v, each [batch, num_heads, n, head_dim], of x [batch, n, hidden_size]."""
    normed = layer.input_norm(x)
    norms = (layer.q_norm, layer.k_norm, None)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    for projection, norm, rotates in zip(projections, norms, (True, True, False), strict=True):
        heads = projection(normed).unflatten(-1, (-1, lean.shape.head_dim))
        if norm is not None:
            heads = norm(heads)
        heads = heads.transpose(1, 2)
        if rotates:
            first, second = heads.chunk(2, dim=-1)
            cos, sin = (table[:, None] for table in tables)
            heads = heads * cos + torch.cat([-second, first], dim=-1) * sin
        yield heads


def _add_outputs(layer: DecoderLayer, x: Tensor, o: Tensor) -> Tensor:
    """x behind the layer, with attention's output o [batch, num_qo_heads, n, head_dim]."""
    x = x + layer.o_proj(o.transpose(1, 2).flatten(2))
    normed = layer.mlp_norm(x)
    return x + layer.down_proj(silu(layer.gate_proj(normed)) * layer.up_proj(normed))
