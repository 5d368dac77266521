"""The tokens of largest attention weight, from the scores that `retrieval_attention` leaves.

Exact, in three launches without atomics, so that the same input gives the same list:

1. The importance of every token, as the bits of a float (which are in the order of the floats), and
   the largest of each group of 2**level tokens. A group's tokens are far apart in the chunk, as
   important ones are often neighbours.
2. k groups whose largest token reaches a value are k tokens that do. So nearly the k-th largest of
   the groups' maxima is a bound that at least k tokens reach, whatever the weights look like, and
   seldom many more: 1.1 to 1.6 k of them if important tokens lie anywhere. Every program finds it
   for itself and puts the tokens of its segment that reach it into a list.
3. One program per list closes in on the k-th largest of these candidates, which fit its registers,
   and writes those above in order. Where a rule ends the list sooner, it first finds how many of
   the k are left: those above a bound, or the first that sum up to a share.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import check_dims, check_tensor
from gpu_ops.early_launch import can_launch_early, early_option
from gpu_ops.launch import next_power_of_2, pointer, runs_kernel
from gpu_ops.top_k_candidates import TopKBuffers, candidates_kernel, importance_kernel
from gpu_ops.top_k_lists import TopKLists
from gpu_ops.top_k_select import select_tokens_kernel

_ENDS = 512  # sinks and recent tokens that are looked at together: one for each thread


def top_k_tokens(
    scores: Tensor,
    lse: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    sink_tokens: int,
    recent_tokens: int,
    budget_tokens: int,
    shared: bool,
    buffers: TopKBuffers,
    selection: Tensor,
    counts: Tensor,
    host_selection: Tensor | None = None,
    host_counts: Tensor | None = None,
    ratio: float | None = None,
    top_p: float | None = None,
    threshold: float | None = None,
) -> None:
    """List the tokens that some KV heads attend to most.

    The lists are `TopKLists`. A token's importance is its attention weight by float32, summed over
    the query heads of the KV head, or of all of `heads` if they share a list.

    Args:
        scores: float32 [n, H, group_size, max_tokens] as `retrieval_attention` leaves them, in base
            2; max_tokens a multiple of 16.
        lse: float32 [n, num_qo_heads], natural log.
        positions: int64 [n], each row's last token; -1 for an inactive row.
        heads: int32 [H], ascending KV heads, on the device, whose existence is not checked.
        shared: one list per row instead of one per KV head.
        buffers: for n * H lists, or n if shared.
        selection, counts, host_selection, host_counts: of `TopKLists`, one a row if shared. A count
            is -1 for NaN or infinity in the lse or among the importances to choose from; with top_p
            among all of them.
        ratio, top_p, threshold: of `TopKLists`.
    """
    check_dims("scores", scores, "[n, H, group_size, max_tokens]")
    n, num_heads, group_size, max_tokens = scores.shape
    num_qo_heads, device = lse.shape[-1], scores.device
    if num_qo_heads % group_size or num_heads > num_qo_heads // group_size:
        raise ValueError(
            f"lse must have the query heads of at least {num_heads} KV heads of {group_size},"
            f" got {num_qo_heads}"
        )
    num_lists, out_lists = (1, 1) if shared else (num_heads, num_qo_heads // group_size)
    lists = TopKLists(
        sink_tokens,
        recent_tokens,
        budget_tokens,
        selection,
        counts,
        host_selection,
        host_counts,
        ratio,
        top_p,
        threshold,
    )
    check_tensor("scores", scores, scores.shape, torch.float32, device)
    check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    lists.check(n, num_lists, out_lists, max_tokens, buffers, device)
    if not runs_kernel(scores):
        return top_k_tokens_reference(scores, lse, positions, heads, shared, lists)
    launch, stride = buffers.launch, buffers.importance.shape[1]
    found = (buffers.candidates, buffers.lengths)
    early = can_launch_early(scores)  # each while the kernel before it runs, if the GPU can
    importance_kernel[(-(-max_tokens // launch.chunk_tokens), num_lists, n)](
        scores,
        lse,
        positions,
        heads,
        buffers.importance,
        buffers.maxima,
        max_tokens,
        stride,
        *lists.sizes,
        num_heads,
        num_lists,
        num_qo_heads,
        group_size,
        launch.chunk_tokens,
        launch.max_groups,
        launch.max_level,
        early,
        num_warps=launch.num_warps[0],
        **early_option(early),
    )
    heads_of_list = num_heads // num_lists * group_size
    candidates_kernel[(launch.segments, num_lists, n)](
        positions,
        buffers.importance,
        buffers.maxima,
        *found,
        stride,
        *lists.sizes,
        ratio,
        num_lists,
        launch.chunk_tokens,
        launch.max_groups,
        launch.max_level,
        launch.segments,
        launch.segment_tile,
        early,
        num_warps=launch.num_warps[1],
        **early_option(early),
    )
    select_tokens_kernel[(num_lists, n)](
        scores,
        lse,
        positions,
        heads,
        *found,
        selection,
        counts,
        pointer(host_selection),
        pointer(host_counts),
        max_tokens,
        stride,
        *lists.sizes,
        ratio,
        None if top_p is None else top_p * heads_of_list,
        None if threshold is None else bits_at_most(threshold * heads_of_list),
        num_heads,
        num_lists,
        out_lists,
        num_qo_heads,
        group_size,
        next_power_of_2(heads_of_list),
        launch.segments,
        launch.segment_tile,
        launch.tile,
        min(launch.tile, _ENDS),
        early,
        num_warps=launch.num_warps[2],
        **early_option(early),
    )


def top_k_tokens_reference(
    scores: Tensor, lse: Tensor, positions: Tensor, heads: Tensor, shared: bool, lists: TopKLists
) -> None:
    """`top_k_tokens` by a sort."""
    group_size = scores.shape[2]
    for row, position in enumerate(positions.tolist()):
        kv_len = position + 1
        row_lse = lse[row].view(-1, group_size)[heads.long()]
        weights = torch.exp2(scores[row, :, :, :kv_len] - row_lse[..., None] * math.log2(math.e))
        importance = weights.flatten(0, 1).sum(0)[None] if shared else weights.sum(1)
        for i, of_tokens in enumerate(importance):
            of_list = row_lse if shared else row_lse[i]
            counting = of_tokens
            if lists.top_p is None:
                counting = of_tokens[lists.sink_tokens : kv_len - lists.recent_tokens]
            is_known = bool(of_list.isfinite().all()) and (
                kv_len <= lists.budget_tokens or bool(counting.isfinite().all())
            )
            target = (row, 0 if shared else int(heads[i]))
            lists.write(target, of_tokens, is_known=is_known, heads_of_list=of_list.numel())


def bits_at_most(x: float) -> int:
    """Bits of the largest float32 that does not exceed x, which is above 0."""
    rounded = torch.tensor(x, dtype=torch.float64).float()
    return int(rounded.view(torch.int32)) - int(float(rounded) > x)
