"""Prefill: many new tokens at once, layer by layer, with exact attention.

Layer by layer, because a finished layer's K/V can leave for the host store while the next one
computes, and because attention then reads one layer's keys as one contiguous array. Inside a layer
the tokens go through in slices, so that only the hidden states and one layer's K/V grow with the
prompt: hidden_size + 2 * num_kv_heads * head_dim elements per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from offload.batch import RaggedBatch
from offload.kv_store import KVStore
from offload.models import DecoderLayer, LeanModel

# Gets (seq, layer_idx, queries [num_qo_heads, n, head_dim] rotated, kv_len of the last of them).
OnQueries = Callable[[int, int, torch.Tensor, int], None]
KV = tuple[torch.Tensor, torch.Tensor]  # keys, values: each [num_kv_heads, kv_len, head_dim]

# torch's fused CPU attention. The public scaled_dot_product_attention calls the same function but
# does not return the log-sum-exp, without which two parts of a softmax cannot be merged.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prefill(
    model: LeanModel,
    hidden: torch.Tensor,
    batch: RaggedBatch,
    *,
    store: KVStore | None,
    seqs: Sequence[int],
    slice_tokens: int,
    on_queries: OnQueries | None = None,
) -> torch.Tensor:
    """Run all layers over the new tokens of `batch`.

    Args:
        hidden: [num_tokens, hidden_size], the embeddings; overwritten.
        store: takes the new K/V, for which room is reserved; None computes without a cache.
        seqs: the store's sequence of each sequence of `batch`; its cached tokens are attended to.
        slice_tokens: tokens that go through a layer at one time.
        on_queries: sees the queries of every slice of every sequence, in order.

    Returns:
        [num_tokens, hidden_size], before the final norm.

    Raises:
        ValueError: for keys or values that are not finite.
    """
    shape = model.attention
    cos, sin = (table[0] for table in model.rotary_emb(hidden, batch.position_ids[None]))
    kv_shape = (shape.num_kv_heads, batch.num_tokens, shape.head_dim)
    keys, values = hidden.new_empty(kv_shape), hidden.new_empty(kv_shape)
    past: list[KV | None] = [None] * batch.num_sequences

    for layer_idx, layer in enumerate(model.layers):
        if store is not None:
            past = [store.gather(seq, layer_idx) if store.kv_len(seq) else None for seq in seqs]
        for start in range(0, batch.num_tokens, slice_tokens):
            stop = min(start + slice_tokens, batch.num_tokens)
            x = hidden[start:stop]
            q, k, v = project_qkv(layer, shape.head_dim, x)
            q = rotate(q, cos[start:stop], sin[start:stop])
            keys[:, start:stop] = rotate(k, cos[start:stop], sin[start:stop])
            values[:, start:stop] = v.transpose(0, 1)
            o = torch.empty_like(q.transpose(0, 1), memory_format=torch.contiguous_format)
            for sequence, first, last in batch.spans(start, stop):
                begin = batch.indptr[sequence]
                new = keys[:, begin:last], values[:, begin:last]
                of_slice = slice(first - start, last - start)
                o[of_slice] = attend(q[:, of_slice], past[sequence], new, shape.sm_scale)
                if store is not None and on_queries is not None:
                    seq = seqs[sequence]
                    kv_len = store.kv_len(seq) + last - begin
                    on_queries(seq, layer_idx, q[:, of_slice], kv_len)
            x += layer.o_proj(o.flatten(1))
            mlp_in = layer.mlp_norm(x)
            gate = functional.silu(layer.gate_proj(mlp_in), inplace=True)
            x += layer.down_proj(gate.mul_(layer.up_proj(mlp_in)))
        if store is not None:
            for sequence, start, stop in batch.spans():
                rows = slice(start, stop)
                new_keys, new_values = keys[:, rows], values[:, rows]
                store.append(
                    seqs[sequence], layer_idx, new_keys.transpose(0, 1), new_values.transpose(0, 1)
                )
    return hidden


def project_qkv(
    layer: DecoderLayer, head_dim: int, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [n, num_heads, head_dim] of x [n, hidden_size], not yet rotated."""
    x = layer.input_norm(x)
    q, k, v = (
        projection(x).unflatten(1, (-1, head_dim))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    return q, k, v


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: x [n, num_heads, head_dim] -> [num_heads, n, head_dim], contiguous.

    x * cos + rotate_half(x) * sin, with the rounding points of transformers.
    """
    half = x.shape[-1] // 2
    x = x.transpose(0, 1)
    x1, x2 = x[..., :half], x[..., half:]
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.sub(x1 * cos[:, :half], x2 * sin[:, :half], out=rotated[..., :half])
    torch.add(x2 * cos[:, half:], x1 * sin[:, half:], out=rotated[..., half:])
    return rotated


def attend(q: torch.Tensor, past: KV | None, new: KV, sm_scale: float) -> torch.Tensor:
    """Exact causal attention of the last n tokens of `new` over `past` and `new`.

    Args:
        q: [num_qo_heads, n, head_dim].
        past, new: K/V of the tokens cached before, and of those that end with the n queries.

    Returns:
        [n, num_qo_heads, head_dim].
    """
    num_kv_heads, num_new, head_dim = new[0].shape
    num_before = num_new - q.shape[1]
    q = q.reshape(num_kv_heads, -1, q.shape[1], head_dim)  # the group's query heads together
    o, lse = _causal(q, (new[0][:, num_before:], new[1][:, num_before:]), sm_scale)
    before = (new[0][:, :num_before], new[1][:, :num_before]) if num_before else None
    for part in (before, past):
        if part is not None:
            o, lse = merge_state(o, lse, *_unmasked(q, part, sm_scale))
    return o.flatten(0, 1).transpose(0, 1)


def merge_state(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two partial softmaxes over disjoint keys as one: o [..., head_dim], lse [...] (natural)."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp()[..., None] for part in (lse_a, lse_b))
    o = (o_a * weight_a).add_(o_b * weight_b)
    return o.to(o_a.dtype), lse


def _causal(q: torch.Tensor, kv: KV, sm_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [num_kv_heads, group_size, n, head_dim] over their own n keys."""
    # A KV head is a batch entry whose query heads see the same keys through a stride of zero.
    keys, values = (rows[:, None].expand(-1, q.shape[1], -1, -1) for rows in kv)
    o, lse = _flash_attention(q, keys, values, 0.0, True, scale=sm_scale)
    return o, lse


def _unmasked(q: torch.Tensor, kv: KV, sm_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [num_kv_heads, group_size, n, head_dim] over all keys of `kv`."""
    # Without a mask the group's query heads are only more queries of the same KV head.
    keys, values = (rows[:, None] for rows in kv)
    queries = q.flatten(1, 2)[:, None]
    o, lse = _flash_attention(queries, keys, values, 0.0, False, scale=sm_scale)
    return o.view(q.shape), lse.view(q.shape[:-1])
