"""Decode attention over GPU pages: the layers whose KV stays on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dtype,
    check_group,
    check_head_dim,
    check_page_tokens,
    check_tensor,
)
from gpu_ops.launch import runs_kernel
from gpu_ops.rope_publish import page_at
from gpu_ops.split_kv import PROGRAMS_PER_MULTIPROCESSOR, attend_pages
from gpu_ops.window_attention import attend_reference

_MAX_SPLITS = 128


def num_kv_splits(num_kv_heads: int, num_multiprocessors: int) -> int:
    """Splits with which one row fills the GPU: two programs on each multiprocessor."""
    programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    return max(1, min(_MAX_SPLITS, programs // num_kv_heads))


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
    attend_pages(
        query,
        page_table,
        positions,
        None,
        page_heads=num_kv_heads,
        group_size=group_size,
        page_tokens=page_tokens,
        sm_scale=sm_scale,
        partial_out=partial_out,
        partial_lse=partial_lse,
        out=out,
        lse=None,
        scores=None,
        launch=None,
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
        kv = gather_pages(page_table[row], kv_len, page_shape, query.dtype)
        o, _ = attend_reference(query[row].view(-1, head_dim), kv[0], kv[1], sm_scale)
        out[row] = o.flatten()


def gather_pages(
    page_table: Tensor, kv_len: int, page_shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    """[2, heads, kv_len, head_dim]: a row's tokens, copied from its pages in CPU memory.

    Args:
        page_table: int64 [max_pages], addresses.
        page_shape: (2, heads, page_tokens, head_dim).
    """
    addresses = page_table[: -(-kv_len // page_shape[2])].tolist()
    pages = [page_at(address, page_shape, dtype) for address in addresses]
    return torch.cat(pages, dim=2)[:, :, :kv_len]
