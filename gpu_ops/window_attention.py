"""The GPU's part of a layer whose KV is on the host: sink tokens and the recent window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dims,
    check_dtype,
    check_group,
    check_head_dim,
    check_latent_dim,
    check_rows,
    check_tensor,
    num_parts,
)
from gpu_ops.launch import jit, runs_kernel, tl
from gpu_ops.online_softmax import NUM_STAGES, Tiles, attend_rows, capped, load_query
from gpu_ops.row_format import as_numbers


@jit
def window_attention_kernel(
    query: tl.tensor,
    window: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,  # sm_scale * log2(e)
    cap: tl.tensor,  # as of `score_tile`
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program per row and BLOCK_G query heads of a KV head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // NUM_GROUPS
    # Slots fill in order and stay full, so the tokens inside are the first so many slots.
    num_tokens = tl.minimum(tl.load(positions + row) + 1, WINDOW_TOKENS).to(tl.int32)
    first_head = (row * NUM_KV_HEADS + kv_head) * GROUP_SIZE
    g = tl.program_id(1) % NUM_GROUPS * BLOCK_G + tl.arange(0, BLOCK_G)
    q, q_rest = load_query(query, first_head, g, GROUP_SIZE, HEAD_DIM, BLOCK_D), None
    if BLOCK_R > 0:
        q_rest = load_query(query, first_head, g, GROUP_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D)
    PARTS: tl.constexpr = 1 if LATENT_DIM > 0 else 2
    keys = window + (row * PARTS * NUM_KV_HEADS + kv_head) * (WINDOW_TOKENS * ROW_ITEMS)
    values = keys + NUM_KV_HEADS * WINDOW_TOKENS * ROW_ITEMS

    row_max, row_sum, acc = attend_rows(
        q,
        q_rest,
        keys,
        values,
        0,
        num_tokens,
        scale,
        cap,
        HEAD_DIM,
        ROW_ITEMS,
        LATENT_DIM,
        BLOCK_T,
        BLOCK_V,
    )
    # An inactive row has attended to nothing: out 0, lse -inf. NaN is no such sum.
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    o = acc / row_sum[:, None]
    VALUE_DIM: tl.constexpr = LATENT_DIM if LATENT_DIM > 0 else HEAD_DIM
    d = tl.arange(0, BLOCK_V)
    inside = (g < GROUP_SIZE)[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(out + (first_head + g)[:, None] * HEAD_DIM + d[None, :], o, mask=inside)
    natural = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse + first_head + g, natural, mask=g < GROUP_SIZE)


def window_attention(
    query: Tensor,
    window: Tensor,
    positions: Tensor,
    *,
    sm_scale: float,
    out: Tensor,
    lse: Tensor,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend to the tokens in the window: with kv_len = position + 1, those of
    [0, min(sink_tokens, kv_len)) and [max(sink_tokens, kv_len - recent_tokens), kv_len).

    Args:
        query: [n, num_qo_heads * head_dim].
        window: [n, 2, num_kv_heads, sink_tokens + recent_tokens, row] as `rope_publish` fills it,
            the row's own token included: rows of head_dim in query's dtype, or of int8
            (`row_format`). How many of its tokens are sinks makes no difference here: they fill it
            in order, and attention does not ask in which order it was refilled. With a latent_dim
            keys alone, [n, 1, ..].
        positions: int64 [n], -1 for an inactive row, whose out is 0 and lse -inf.
        out: float32 [n, num_qo_heads * head_dim].
        lse: float32 [n, num_qo_heads], natural log.
        latent_dim, softcap: as of `retrieval_attention`.
    """
    check_dtype("query", query)
    check_dims("window", window, "[n, 2, num_kv_heads, window_tokens, row]")
    n, _, num_kv_heads, window_tokens, _ = window.shape
    num_qo_heads = lse.shape[1]
    device, head_dim = query.device, query.shape[1] // num_qo_heads
    check_head_dim(head_dim)
    check_latent_dim(latent_dim, head_dim)
    group_size = check_group(num_qo_heads, num_kv_heads)
    shape = (n, num_qo_heads * head_dim)
    check_tensor("query", query, shape, query.dtype, device)
    parts = num_parts(latent_dim)
    check_rows("window", window, (n, parts, num_kv_heads, window_tokens), head_dim, query)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("out", out, shape, torch.float32, device)
    check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    if not runs_kernel(query):
        return window_attention_reference(
            query,
            window,
            positions,
            sm_scale=sm_scale,
            out=out,
            lse=lse,
            latent_dim=latent_dim,
            softcap=softcap,
        )
    tiles = Tiles.of(head_dim, group_size, query.element_size(), window.dtype, latent_dim)
    window_attention_kernel[(n, num_kv_heads * tiles.num_groups)](
        query,
        window,
        positions,
        out,
        lse,
        sm_scale * math.log2(math.e),
        softcap * math.log2(math.e) or None,
        num_kv_heads,
        group_size,
        head_dim,
        window.shape[4],
        window_tokens,
        latent_dim,
        tiles.group,
        tiles.num_groups,
        tiles.tokens,
        tiles.dims,
        tiles.rest_dims,
        tiles.value_dims,
        num_warps=tiles.num_warps,
        num_stages=NUM_STAGES,
    )


def window_attention_reference(
    query: Tensor,
    window: Tensor,
    positions: Tensor,
    *,
    sm_scale: float,
    out: Tensor,
    lse: Tensor,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """`window_attention` by torch, in float32."""
    window_tokens, head_dim = window.shape[3], query.shape[1] // lse.shape[1]
    out.zero_()
    lse.fill_(float("-inf"))
    for row, position in enumerate(positions.tolist()):
        if position >= 0:
            kv = as_numbers(window[row, :, :, : min(position + 1, window_tokens)], head_dim)
            values = kv[-1, ..., : latent_dim or head_dim]
            q = query[row].view(-1, head_dim)
            o, row_lse = attend_reference(q, kv[0], values, sm_scale, softcap)
            out[row].view(-1, head_dim)[:, : o.shape[1]], lse[row] = o, row_lse


def attend_reference(
    q: Tensor, keys: Tensor, values: Tensor, sm_scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """float32 o [num_qo_heads, v_dim] and lse [num_qo_heads] of one token's queries q.

    Args:
        q: [num_qo_heads, head_dim].
        keys, values: [num_kv_heads, kv_len, head_dim or v_dim].
    """
    grouped = q.float().view(keys.shape[0], -1, q.shape[1])
    scores = capped(grouped @ keys.float().transpose(1, 2) * sm_scale, softcap)
    # Tokens of which none counts, as the kernels have it: -inf would say that there were none.
    lse = torch.logsumexp(scores, dim=-1)
    lse = lse.masked_fill(lse == float("-inf"), float("nan"))
    o = (scores - lse[..., None]).exp() @ values.float()
    return o.view(len(q), -1), lse.flatten()
