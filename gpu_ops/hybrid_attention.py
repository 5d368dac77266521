"""Decode attention over GPU pages of dense and block-sparse KV heads in one launch.

LycheeDecode's kernel: few heads attend to everything, the others to some blocks each, so that heads
differ in their work by a factor of thirty. The tiles of all (row, KV head) pairs are therefore one
sequence, of which every program takes an equal share (stream-K): it may attend for the end of one
pair and the beginning of the next, and leaves a partial state for each. A second kernel merges
them. Both compute the shares from the counts and positions on the device, so that one capture
serves all lengths and lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.checks import (
    MIN_PAGE_TOKENS,
    check_dtype,
    check_group,
    check_head_dim,
    check_page_tokens,
    check_tensor,
)
from gpu_ops.cpu_pages import gather_pages
from gpu_ops.early_launch import can_launch_early, early_option
from gpu_ops.hybrid_kernels import hybrid_attention_kernel, merge_hybrid_kernel
from gpu_ops.launch import compiles, next_power_of_2, runs_kernel
from gpu_ops.online_softmax import MIN_GROUP, tile_tokens
from gpu_ops.window_attention import attend_reference

DENSE = -1  # a block count: the head attends to all tokens

_MERGE_PROGRAMS = 256  # that the merge has at least, by parts of a head's output
_MERGED_ELEMENTS = 4096  # of the splits of a head, that a program of the merge loads at once
_PREFETCHED_LINES = 128  # per program, of each operand


@dataclass(frozen=True)
class HybridLaunch:
    """How the kernels are launched.

    Attributes:
        tile_tokens: keys that a program attends to at a time, a power of two; None: 8 KiB of them.
            Never more than a page or a block.
        num_warps, num_stages: of a program of the first kernel.
        segment_tiles: what each pair counts for beyond its tiles, as a program that changes over to
            another pair has nothing in flight for a while.
        merges_early: the merge is launched while the first kernel runs (`early_launch`), where the
            GPU can.
        starts_early: so is the first kernel, while the one before it in the stream runs.
        prefetches: programs bring page table, lists and query into the L2 before they need them.
    """

    tile_tokens: int | None = None
    num_warps: int = 4
    num_stages: int = 3
    segment_tiles: int = 1
    merges_early: bool = True
    starts_early: bool = True
    prefetches: bool = True


_LAUNCH = HybridLaunch()


def hybrid_programs(num_multiprocessors: int) -> int:
    """Programs that fill the GPU at once: two on each multiprocessor."""
    return 2 * num_multiprocessors


def hybrid_attention(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_indices: Tensor,
    block_counts: Tensor,
    *,
    num_kv_heads: int,
    page_tokens: int,
    block_tokens: int,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    launch: HybridLaunch = _LAUNCH,
) -> None:
    """Attend each KV head of each row to all tokens [0, position], or to some blocks of them.

    Args:
        query, page_table, positions: as `retrieval_attention` of all KV heads takes them.
        block_indices: int32 [n, num_kv_heads, max_blocks], distinct blocks in any order. Block b is
            the tokens [b * block_tokens, (b + 1) * block_tokens) that the row has.
        block_counts: int32 [n, num_kv_heads], blocks of each list, or `DENSE`. 0 is as inactive.
        page_tokens, block_tokens: powers of two; of at least 64 for full speed.
        partial_out, partial_lse: scratch, float32 [slots, group_size, head_dim] and
            [slots, group_size] with slots = num_programs + n * num_kv_heads: the programs of the
            launch, as many as `hybrid_programs` says.
        out: [n, num_qo_heads * head_dim], query's dtype.
        lse: optional float32 [n, num_qo_heads], natural log.
        launch: how the kernels are launched.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_dtype("query", query)
    if partial_out.dim() != 3:
        raise ValueError(
            f"partial_out must be [slots, group_size, head_dim], got {list(partial_out.shape)}"
        )
    slots, group_size, head_dim = partial_out.shape
    n, device = query.shape[0], query.device
    num_qo_heads = num_kv_heads * group_size
    num_pairs = n * num_kv_heads
    check_head_dim(head_dim)
    check_group(num_qo_heads, num_kv_heads)
    check_page_tokens(page_tokens)
    check_page_tokens(block_tokens, "block_tokens")
    if slots <= num_pairs:
        raise ValueError(
            f"partial_out must have more slots than the {num_pairs} pairs of rows and KV heads,"
            f" got {slots}"
        )
    shape, pairs = (n, num_qo_heads * head_dim), (n, num_kv_heads)
    check_tensor("query", query, shape, query.dtype, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    listed = (*pairs, block_indices.shape[-1])
    check_tensor("block_indices", block_indices, listed, torch.int32, device)
    check_tensor("block_counts", block_counts, pairs, torch.int32, device)
    check_tensor("partial_out", partial_out, partial_out.shape, torch.float32, device)
    check_tensor("partial_lse", partial_lse, (slots, group_size), torch.float32, device)
    check_tensor("out", out, shape, query.dtype, device)
    if lse is not None:
        check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    half_tile = tile_tokens(head_dim, query.element_size()) // 2
    tile = launch.tile_tokens or max(MIN_PAGE_TOKENS, half_tile)
    check_page_tokens(tile, "tile_tokens")
    operands = (query, page_table, positions, block_indices, block_counts)
    if not runs_kernel(query):
        page_shape = (2, num_kv_heads, page_tokens, head_dim)
        return hybrid_attention_reference(*operands, page_shape, block_tokens, sm_scale, out, lse)
    block_t = min(tile, page_tokens, block_tokens)
    block_d, block_p = next_power_of_2(head_dim), next_power_of_2(num_pairs)
    num_programs = slots - num_pairs
    shares = (launch.segment_tiles, num_kv_heads, group_size, head_dim)
    can = can_launch_early(query)
    merges_early, starts_early = launch.merges_early and can, launch.starts_early and can
    hybrid_attention_kernel[(num_programs,)](
        *operands,
        partial_out,
        partial_lse,
        num_pairs,
        page_table.shape[1],
        block_indices.shape[2],
        sm_scale * math.log2(math.e),
        *shares,
        page_tokens,
        block_tokens,
        block_p,
        max(MIN_GROUP, next_power_of_2(group_size)),
        block_t,
        block_d,
        _PREFETCHED_LINES,
        launch.prefetches and (query.is_cuda or compiles()),
        merges_early or starts_early,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **early_option(starts_early),
    )
    parts = min(block_d // 16, max(1, _MERGE_PROGRAMS // (num_pairs * group_size)))
    part_d = block_d // next_power_of_2(parts)
    merge_hybrid_kernel[(num_pairs * group_size, -(-head_dim // part_d))](
        partial_out,
        partial_lse,
        positions,
        block_counts,
        out,
        partial_lse if lse is None else lse,
        num_pairs,
        num_programs,
        *shares,
        block_tokens,
        block_p,
        block_t,
        min(_MERGED_ELEMENTS // part_d, next_power_of_2(num_programs)),
        part_d,
        lse is not None,
        merges_early or starts_early,
        num_warps=4,
        **early_option(merges_early),
    )


def hybrid_attention_reference(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_indices: Tensor,
    block_counts: Tensor,
    page_shape: tuple[int, int, int, int],
    block_tokens: int,
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`hybrid_attention` by torch, in float32; pages [*page_shape] are CPU memory."""
    _, num_kv_heads, _, head_dim = page_shape
    heads = out.view(len(out), num_kv_heads, -1, head_dim).zero_()
    queries = query.view(heads.shape)
    if lse is not None:
        lse.fill_(float("-inf"))
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        kv_len = position + 1
        kv = gather_pages(page_table[row], kv_len, page_shape, query.dtype)
        for kv_head, count in enumerate(block_counts[row].tolist()):
            chosen = torch.ones(kv_len, dtype=torch.bool)
            if count >= 0:
                blocks = block_indices[row, kv_head, :count]
                chosen = torch.isin(torch.arange(kv_len) // block_tokens, blocks)
            if not bool(chosen.any()):
                continue
            kept = kv[:, kv_head : kv_head + 1, chosen]
            o, row_lse = attend_reference(queries[row, kv_head], kept[0], kept[1], sm_scale)
            heads[row, kv_head] = o.to(out.dtype)
            if lse is not None:
                lse[row].view(num_kv_heads, -1)[kv_head] = row_lse
