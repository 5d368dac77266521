"""Decode attention over GPU pages: the layers whose KV stays on the GPU."""

from __future__ import annotations

from torch import Tensor

from gpu_ops.checks import check_group
from gpu_ops.retrieval_attention import check_partial_out, retrieval_attention
from gpu_ops.split_kv import PROGRAMS_PER_MULTIPROCESSOR

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
    """`retrieval_attention` of all KV heads.

    Args:
        partial_out, partial_lse: with the num_splits of `num_kv_splits`.
        out: [n, num_qo_heads * head_dim], query's dtype.
    """
    check_partial_out(partial_out)
    retrieval_attention(
        query,
        page_table,
        positions,
        None,
        group_size=check_group(partial_out.shape[1], num_kv_heads),
        page_tokens=page_tokens,
        sm_scale=sm_scale,
        partial_out=partial_out,
        partial_lse=partial_lse,
        out=out,
    )
