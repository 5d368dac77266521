"""Decode attention over GPU pages: the layers whose KV stays on the GPU.

Flash decoding: every row's tokens are split into equal pieces, each attended to by one program per
KV head, and a second kernel merges the pieces. The grid is fixed when a CUDA graph is captured, so
the number of splits is too; how long they are is computed on the device from the row's position.
All splits of the longest row run at once on the whole GPU, whatever the lengths of the others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dtype,
    check_group,
    check_head_dim,
    check_page_tokens,
    check_tensor,
)
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.online_softmax import MIN_GROUP, attend_tile, load_query, tile_tokens
from gpu_ops.rope_publish import page_at
from gpu_ops.split_state import merge_states, split_length, store_state
from gpu_ops.window_attention import attend_reference

_PROGRAMS_PER_MULTIPROCESSOR = 2
_MAX_SPLITS = 128
# Rows of a batch fill the GPU together, so that their pieces need not be as small.
_MAX_TILES_PER_SPLIT = 8
# Of these, one is for the address that the next tile of keys is loaded from.
_NUM_STAGES = 5


def num_kv_splits(num_kv_heads: int, num_multiprocessors: int) -> int:
    """Splits with which one row fills the GPU: two programs on each multiprocessor."""
    programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    return max(1, min(_MAX_SPLITS, programs // num_kv_heads))


@jit
def paged_attention_kernel(
    query: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,  # in base 2
    max_pages: tl.tensor,
    scale: tl.tensor,  # sm_scale * log2(e)
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,  # divides PAGE_TOKENS: a tile lies in one page, contiguous
    BLOCK_D: tl.constexpr,
) -> None:
    """One program per split, KV head and row."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    length = split_length(kv_len, NUM_SPLITS, BLOCK_T, MIN_TILES)
    first = split * length
    last = tl.minimum(first + length, kv_len)
    if first >= last:
        return  # nor does the second kernel read it

    first_head = (row * NUM_KV_HEADS + kv_head) * GROUP_SIZE
    q = load_query(query, first_head, GROUP_SIZE, HEAD_DIM, BLOCK_G, BLOCK_D)
    pages = page_table + row * max_pages
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_T):
        page = tl.load(pages + start // PAGE_TOKENS).to(tl.pointer_type(query.dtype.element_ty))
        keys = page + (kv_head * PAGE_TOKENS + start % PAGE_TOKENS).to(tl.int64) * HEAD_DIM
        row_max, row_sum, acc = attend_tile(
            q,
            keys,
            keys + NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM,
            last - start,
            scale,
            row_max,
            row_sum,
            acc,
            HEAD_DIM,
            BLOCK_T,
            BLOCK_D,
        )

    slots = (first_head + tl.arange(0, BLOCK_G)) * NUM_SPLITS + split
    store_state(
        partial_out,
        partial_lse,
        slots,
        row_max,
        row_sum,
        acc,
        GROUP_SIZE,
        HEAD_DIM,
        BLOCK_G,
        BLOCK_D,
    )


@jit
def merge_splits_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of the kernel before
    BLOCK_S: tl.constexpr,  # at least NUM_SPLITS
    TILE_S: tl.constexpr,  # of splits; divides BLOCK_S
    BLOCK_D: tl.constexpr,
) -> None:
    """One program per row and query head."""
    row = tl.program_id(0).to(tl.int64)
    head = row * NUM_QO_HEADS + tl.program_id(1)
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    used = tl.cdiv(kv_len, split_length(kv_len, NUM_SPLITS, BLOCK_T, MIN_TILES))
    d = tl.arange(0, BLOCK_D)
    _, total, acc = merge_states(
        partial_out, partial_lse, head * NUM_SPLITS, 1, used, d, HEAD_DIM, BLOCK_S, TILE_S
    )
    o = acc / tl.where(total > 0, total, 1.0)  # an inactive row has no splits: 0
    tl.store(out + head * HEAD_DIM + d, o.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def paged_decode_attention(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    *,
    num_kv_heads: int,
    page_tokens: int,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
) -> None:
    """Attend to all tokens [0, position] of each row.

    Args:
        query: [n, num_qo_heads * head_dim].
        page_table: int64 [n, max_pages], addresses of GPU pages of this layer, each laid out
            [K|V][num_kv_heads][page_tokens][head_dim] in query's dtype and aligned to 16 bytes.
        positions: int64 [n], each row's last token, whose K/V are in their page; -1 for an
            inactive row, whose out is 0.
        page_tokens: a power of two; of at least 64 for full speed.
        partial_out, partial_lse: scratch, float32 [n, num_qo_heads, num_splits, head_dim] and
            [n, num_qo_heads, num_splits] with the num_splits of `num_kv_splits`.
        out: [n, num_qo_heads * head_dim], query's dtype.
    """
    check_dtype("query", query)
    if partial_out.dim() != 4:
        raise ValueError(
            "partial_out must be [n, num_qo_heads, num_splits, head_dim],"
            f" got {list(partial_out.shape)}"
        )
    n, num_qo_heads, num_splits, head_dim = partial_out.shape
    device = query.device
    check_head_dim(head_dim)
    check_page_tokens(page_tokens)
    group_size = check_group(num_qo_heads, num_kv_heads)
    shape = (n, num_qo_heads * head_dim)
    check_tensor("query", query, shape, query.dtype, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("partial_out", partial_out, partial_out.shape, torch.float32, device)
    check_tensor("partial_lse", partial_lse, (n, num_qo_heads, num_splits), torch.float32, device)
    check_tensor("out", out, shape, query.dtype, device)
    if not runs_kernel(query):
        return paged_decode_attention_reference(
            query,
            page_table,
            positions,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_tokens=page_tokens,
            sm_scale=sm_scale,
            out=out,
        )
    block_t = min(page_tokens, tile_tokens(head_dim, query.element_size()))
    block_d = next_power_of_2(head_dim)
    block_s = next_power_of_2(num_splits)
    min_tiles = min(n, _MAX_TILES_PER_SPLIT)
    paged_attention_kernel[(num_splits, num_kv_heads, n)](
        query,
        page_table,
        positions,
        partial_out,
        partial_lse,
        page_table.shape[1],
        sm_scale * math.log2(math.e),
        num_splits,
        min_tiles,
        num_kv_heads,
        group_size,
        head_dim,
        page_tokens,
        max(MIN_GROUP, next_power_of_2(group_size)),
        block_t,
        block_d,
        num_warps=4,
        num_stages=_NUM_STAGES,
    )
    merge_splits_kernel[(n, num_qo_heads)](
        partial_out,
        partial_lse,
        positions,
        out,
        num_splits,
        min_tiles,
        num_qo_heads,
        head_dim,
        block_t,
        block_s,
        min(16, block_s),
        block_d,
        num_warps=4,
    )


def paged_decode_attention_reference(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    sm_scale: float,
    out: Tensor,
) -> None:
    """`paged_decode_attention` by torch, in float32; pages are CPU memory."""
    page_shape = (2, num_kv_heads, page_tokens, head_dim)
    out.zero_()
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        kv_len = position + 1
        addresses = page_table[row, : -(-kv_len // page_tokens)].tolist()
        pages = [page_at(address, page_shape, query.dtype) for address in addresses]
        kv = torch.cat(pages, dim=2)[:, :, :kv_len]
        o, _ = attend_reference(query[row].view(-1, head_dim), kv[0], kv[1], sm_scale)
        out[row] = o.flatten()
