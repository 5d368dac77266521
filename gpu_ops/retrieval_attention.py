"""Retrieval heads: decode attention of some KV heads over GPU pages that hold only these.

It may leave the scores of all tokens, from which `top_k_tokens` finds what the other heads attend
to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_head_dim, check_page_tokens, check_tensor
from gpu_ops.cpu_pages import gather_pages
from gpu_ops.early_launch import can_launch_early, early_option
from gpu_ops.launch import next_power_of_2, runs_kernel
from gpu_ops.online_softmax import MIN_GROUP
from gpu_ops.split_kv import (
    MAX_TILES_PER_SPLIT,
    PROGRAMS_PER_MULTIPROCESSOR,
    SplitLaunch,
    merge_splits_kernel,
    paged_attention_kernel,
)

_MAX_SPLITS = 1024  # of one head: the lse of all of them are in one program's registers
_MERGE_PROGRAMS = 256  # that the merge has at least, by parts of a head's output
_MERGED_ELEMENTS = 4096  # of the pieces of a head, that a program has in registers at once


def num_retrieval_splits(
    num_heads: int, num_multiprocessors: int, *, per_multiprocessor: int | None = None
) -> int:
    """Splits with which `num_heads` KV heads of one row fill the GPU.

    Args:
        num_heads: retrieval heads of the layer; scratch for several layers takes their smallest
            and is viewed with the splits of each.
        per_multiprocessor: programs on a multiprocessor; None: two.

    Raises:
        ValueError: unless there is at least one head.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    programs = (per_multiprocessor or PROGRAMS_PER_MULTIPROCESSOR) * num_multiprocessors
    return max(1, min(_MAX_SPLITS, programs // num_heads))


def check_partial_out(partial_out: Tensor) -> None:
    """ValueError unless it is of splits of query heads."""
    if partial_out.dim() != 4:
        raise ValueError(
            "partial_out must be [n, num_qo_heads, num_splits, head_dim],"
            f" got {list(partial_out.shape)}"
        )


def retrieval_attention(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor | None,
    *,
    group_size: int,
    page_tokens: int,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    scores: Tensor | None = None,
    launch: SplitLaunch | None = None,
) -> None:
    """Attend to all tokens [0, position] of each row with the query heads of some KV heads.

    Args:
        query: [n, num_qo_heads * head_dim], all of the model's query heads.
        page_table: int64 [n, max_pages], addresses of GPU pages of this layer, each laid out
            [K|V][H][page_tokens][head_dim] in query's dtype and aligned to 16 bytes. Index i of a
            page is KV head heads[i].
        positions: int64 [n], each row's last token, whose K/V are in their page; -1 for an
            inactive row, whose out is 0 and lse -inf.
        heads: int32 [H], ascending KV heads, on the device; below num_qo_heads / group_size, which
            nobody checks. None: all, and `out` is in query's dtype.
        group_size: query heads of a KV head.
        page_tokens: a power of two; of at least 64 for full speed.
        partial_out, partial_lse: scratch, float32 [n, num_qo_heads, num_splits, head_dim] and
            [n, num_qo_heads, num_splits]; for full speed with the num_splits of
            `num_retrieval_splits`.
        out, lse: float32 [n, num_qo_heads * head_dim] and [n, num_qo_heads], natural log. Only the
            query heads of `heads` are written.
        scores: None, or float32 [n, H, group_size, max_tokens], written for the tokens
            [0, position]: query times key times sm_scale, in base 2, that is times log2(e). A token
            has the weight 2**score / e**lse.
        launch: how a split is computed; None: as suits a Hopper GPU.
    """
    check_dtype("query", query)
    check_partial_out(partial_out)
    n, num_qo_heads, num_splits, head_dim = partial_out.shape
    device = query.device
    check_head_dim(head_dim)
    check_page_tokens(page_tokens)
    if group_size < 1 or num_qo_heads % group_size:
        raise ValueError(
            f"num_qo_heads must be a multiple of group_size, got {num_qo_heads} and {group_size}"
        )
    num_kv_heads = num_qo_heads // group_size
    num_heads = num_kv_heads if heads is None else heads.numel()
    if not 1 <= num_heads <= num_kv_heads:
        raise ValueError(f"heads must be 1 to {num_kv_heads} KV heads, got {num_heads}")
    if not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits must be in 1..{_MAX_SPLITS}, got {num_splits}")
    shape = (n, num_qo_heads * head_dim)
    check_tensor("query", query, shape, query.dtype, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    if heads is not None:
        check_tensor("heads", heads, (num_heads,), torch.int32, device)
    check_tensor("partial_out", partial_out, partial_out.shape, torch.float32, device)
    check_tensor("partial_lse", partial_lse, (n, num_qo_heads, num_splits), torch.float32, device)
    check_tensor("out", out, shape, query.dtype if heads is None else torch.float32, device)
    if lse is not None:
        check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    max_tokens = 0
    if scores is not None:
        max_tokens = scores.shape[-1]
        if max_tokens < page_table.shape[1] * page_tokens:
            raise ValueError(
                f"scores must have room for all pages' {page_table.shape[1] * page_tokens} tokens,"
                f" got {max_tokens}"
            )
        scores_shape = (n, num_heads, group_size, max_tokens)
        check_tensor("scores", scores, scores_shape, torch.float32, device)
    operands = (query, page_table, positions, heads)
    if not runs_kernel(query):
        page_shape = (2, num_heads, page_tokens, head_dim)
        return retrieval_attention_reference(
            *operands, group_size, page_shape, sm_scale, out, lse, scores
        )
    launch = launch or SplitLaunch.default(head_dim, query.element_size())
    block_t, block_d = min(page_tokens, launch.tile_tokens), next_power_of_2(head_dim)
    splits = (num_splits, min(n, MAX_TILES_PER_SPLIT), num_qo_heads, group_size, head_dim)
    early = can_launch_early(query)  # the merge, while the splits run
    paged_attention_kernel[(num_splits, num_heads, n)](
        *operands,
        partial_out,
        partial_lse,
        scores,
        page_table.shape[1],
        max_tokens,
        sm_scale * math.log2(math.e),
        *splits,
        num_heads,
        page_tokens,
        max(MIN_GROUP, next_power_of_2(group_size)),
        block_t,
        block_d,
        early,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    parts = min(block_d // 16, max(1, _MERGE_PROGRAMS // (n * num_heads * group_size)))
    merged_d = block_d // next_power_of_2(parts)
    merge_splits_kernel[(n, num_heads * group_size, -(-head_dim // merged_d))](
        partial_out,
        partial_lse,
        positions,
        heads,
        out,
        lse,
        *splits,
        block_t,
        min(_MERGED_ELEMENTS // merged_d, next_power_of_2(num_splits)),
        merged_d,
        early,
        num_warps=4,
        **early_option(early),
    )


def retrieval_attention_reference(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor | None,
    group_size: int,
    page_shape: tuple[int, int, int, int],
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
    scores: Tensor | None,
) -> None:
    """`retrieval_attention` by torch, in float32; pages [*page_shape] are CPU memory."""
    n, head_dim = len(query), page_shape[3]
    num_kv_heads = query.shape[1] // (group_size * head_dim)
    if lse is None:
        lse = out.new_empty(n, num_kv_heads * group_size, dtype=torch.float32)
    kv_heads = slice(None) if heads is None else heads.long()
    grouped_query = query.view(n, num_kv_heads, group_size, head_dim)
    grouped_out, grouped_lse = out.view(grouped_query.shape), lse.view(n, num_kv_heads, group_size)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            grouped_out[row, kv_heads], grouped_lse[row, kv_heads] = 0.0, float("-inf")
            continue
        keys, values = gather_pages(page_table[row], position + 1, page_shape, query.dtype).float()
        of_row = grouped_query[row, kv_heads].float() @ keys.transpose(1, 2) * sm_scale
        of_heads = of_row.logsumexp(-1)
        of_heads = of_heads.masked_fill(of_heads == float("-inf"), float("nan"))
        grouped_lse[row, kv_heads] = of_heads
        o = (of_row - of_heads[..., None]).exp() @ values
        grouped_out[row, kv_heads] = o.to(out.dtype)
        if scores is not None:
            scores[row, :, :, : position + 1] = of_row * math.log2(math.e)
