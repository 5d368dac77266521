"""The answer's tokens, where some layers select and others reuse, as `TidalDecode` decodes them.

As in decoding: the prompt has been read exactly, and only the tokens of the answer are sparse. But
all of these are computed together, which takes a fraction of the time of decoding them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from offload.models import DecoderLayer, LeanModel


@dataclass(frozen=True)
class SparseRule:
    """What a layer that selects hands down: `budget_tokens`, sinks and recent ones among them, of
    the largest weight, which is summed over all its heads.
    """

    budget_tokens: int
    sink_tokens: int = 4
    recent_tokens: int = 64


@dataclass(frozen=True)
class ReadText:
    """A batch of prompts with their answers, read with full attention.

    Attributes:
        tokens: int64 [batch, num_prompt + num_answer]; shorter answers are padded at their end.
        num_prompt: tokens of each prompt.
        answered: bool [batch, num_answer], False for padding.
        keys, values: of each layer [batch, num_kv_heads, num_prompt, head_dim], rotated.
        logits: float32 [batch, num_answer, vocabulary] behind each token of the answer.
        hidden: [batch, num_answer, hidden_size], what the logits are computed from.
    """

    tokens: Tensor
    num_prompt: int
    answered: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor
    hidden: Tensor


@torch.no_grad()
def read_text(lean: LeanModel, tokens: Tensor, num_prompt: int, answered: Tensor) -> ReadText:
    """Read [batch, num_tokens] with full attention, each sequence from position 0.

    Raises:
        NotImplementedError: layers without a norm in front, or of several ropes.
    """
    if any(layer.input_norm is None or layer.spec.rope_idx for layer in lean.layers):
        raise NotImplementedError(
            "training takes layers with a norm before attention and MLP, and one rope for all; "
            "this model has others"
        )
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
    hidden = lean.final_norm(x[:, num_prompt:])
    logits = lean.lm_head(hidden).float()
    return ReadText(tokens, num_prompt, answered, keys, values, logits, hidden)


@torch.no_grad()
def mixed_logits(
    lean: LeanModel, text: ReadText, attends_all: Sequence[bool], rule: SparseRule
) -> Tensor:
    """Logits as `ReadText.logits`, of layers that reuse what others hand down.

    Args:
        attends_all: of each layer whether it attends to everything, and hands tokens down; the
            first layer has to.
    """
    x = lean.embed_tokens(text.tokens[:, text.num_prompt :])
    tables = _rotary_tables(lean, x, text.num_prompt)
    future, always = masks(text, rule)
    reused = always.expand(len(x), *always.shape)
    for layer_idx, layer in enumerate(lean.layers):
        q, k, v = _project(lean, layer, x, tables)
        k = torch.cat([text.keys[layer_idx], k], dim=2)
        v = torch.cat([text.values[layer_idx], v], dim=2)
        # [batch, num_kv_heads, group_size, n, head_dim]
        q = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
        scores = lean.sm_scale * (q @ k[:, :, None].transpose(-1, -2)).float()
        hidden = future if attends_all[layer_idx] else (future | ~reused)[:, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if attends_all[layer_idx]:
            reused = heaviest(weights.sum((1, 2)), always, rule)
        o = weights.to(v.dtype) @ v[:, :, None]
        x = _add_outputs(layer, x, o.flatten(1, 2))
    logits: Tensor = lean.lm_head(lean.final_norm(x)).float()
    return logits


def masks(text: ReadText, rule: SparseRule) -> tuple[Tensor, Tensor]:
    """bool [num_answer, num_tokens] both: what a token must not see, and what it always sees."""
    device, num_tokens = text.tokens.device, text.tokens.shape[1]
    last = torch.arange(text.num_prompt, num_tokens, device=device)[:, None]
    token = torch.arange(num_tokens, device=device)
    future = token > last
    return future, ((token < rule.sink_tokens) | (token > last - rule.recent_tokens)) & ~future


def heaviest(importance: Tensor, always: Tensor, rule: SparseRule) -> Tensor:
    """bool, what a layer or a head hands down, of weights [..., num_answer, num_tokens]."""
    chosen = always.expand_as(importance).clone()
    room = rule.budget_tokens - rule.sink_tokens - rule.recent_tokens
    found = importance.masked_fill(always, -1.0).topk(min(room, importance.shape[-1])).indices
    return chosen.scatter_(-1, found, True)


def _rotary_tables(lean: LeanModel, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(first, first + x.shape[1], device=x.device)[None]
    cos, sin = lean.rotary_emb(x, positions)
    return cos, sin


def _project(
    lean: LeanModel, layer: DecoderLayer, x: Tensor, tables: tuple[Tensor, Tensor]
) -> Iterator[Tensor]:
    """q, k (rotated), v, each [batch, num_heads, n, head_dim], of x [batch, n, hidden_size]."""
    assert layer.input_norm is not None
    normed = layer.input_norm(x)
    norms = (layer.q_norm, layer.k_norm, None)
    for projection, norm, rotates in zip(layer.qkv.parts, norms, (True, True, False), strict=True):
        heads = projection(normed).view(*x.shape[:2], -1, lean.shape.head_dim)
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
    assert layer.mlp_norm is not None
    x = x + layer.o_proj(o.transpose(1, 2).flatten(2))
    normed = layer.mlp_norm(x)
    gate_up, down = layer.dense_mlp
    gate_proj, up_proj = gate_up.parts
    return x + down(silu(gate_proj(normed)) * up_proj(normed))
