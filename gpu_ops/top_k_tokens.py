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
   and writes those above in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_ops.checks import check_dims, check_reachable, check_tensor
from gpu_ops.early_launch import can_launch_early, early_option
from gpu_ops.launch import next_power_of_2, pointer, runs_kernel
from gpu_ops.top_k_candidates import (
    SCORE_ALIGNMENT,
    TopKBuffers,
    candidates_kernel,
    importance_kernel,
)
from gpu_ops.top_k_select import select_tokens_kernel


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
) -> None:
    """List the tokens that some KV heads attend to most.

    A list is of the tokens [0, sink_tokens), the chosen ones ascending, and the last
    recent_tokens; of all tokens if there are at most budget_tokens. Chosen are the
    k = budget_tokens - sink_tokens - recent_tokens of largest importance between sinks and recent
    ones; of equal ones the first. A token's importance is its attention weight by float32, summed
    over the query heads of the KV head, or of all of `heads` if they share a list.

    Args:
        scores: float32 [n, H, group_size, max_tokens] as `retrieval_attention` leaves them, in base
            2; max_tokens a multiple of 16.
        lse: float32 [n, num_qo_heads], natural log.
        positions: int64 [n], each row's last token; -1 for an inactive row.
        heads: int32 [H], ascending KV heads, on the device, which nobody checks to exist.
        shared: one list per row instead of one per KV head.
        buffers: for n * H lists, or n if shared.
        selection: int32 [n, num_kv_heads, budget_tokens], or [n, 1, budget_tokens] if shared. Only
            the lists of `heads` are written, and not what lies beyond their length.
        counts: int32 [n, num_kv_heads] or [n, 1]: the lists' lengths; 0 for an inactive row, -1 for
            NaN or infinity in the lse or among the importances to choose from: no list.
        host_selection, host_counts: None, or pinned host memory that gets the same.
        ratio: k is at most ceil(ratio * kv_len) - sink_tokens - recent_tokens, and at least 0.
    """
    check_dims("scores", scores, "[n, H, group_size, max_tokens]")
    n, num_heads, group_size, max_tokens = scores.shape
    num_qo_heads, device = lse.shape[-1], scores.device
    if num_qo_heads % group_size or num_heads > num_qo_heads // group_size:
        raise ValueError(
            f"lse must have the query heads of at least {num_heads} KV heads of {group_size},"
            f" got {num_qo_heads}"
        )
    if min(sink_tokens, recent_tokens) < 0 or sink_tokens + recent_tokens > budget_tokens:
        raise ValueError(
            f"sink_tokens and recent_tokens must be at least 0 and within the budget of"
            f" {budget_tokens}, got {sink_tokens} and {recent_tokens}"
        )
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}")
    if (host_selection is None) != (host_counts is None):
        raise ValueError("host_selection and host_counts must be given both, or neither")
    lists, out_lists = (1, 1) if shared else (num_heads, num_qo_heads // group_size)
    check_tensor("scores", scores, scores.shape, torch.float32, device)
    check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    check_tensor("selection", selection, (n, out_lists, budget_tokens), torch.int32, device)
    check_tensor("counts", counts, (n, out_lists), torch.int32, device)
    if host_selection is not None and host_counts is not None:
        shape = selection.shape
        check_reachable("host_selection", host_selection, shape, torch.int32, device)
        check_reachable("host_counts", host_counts, counts.shape, torch.int32, device)
    max_lists, stride = buffers.importance.shape
    if max_tokens % SCORE_ALIGNMENT or stride % SCORE_ALIGNMENT:
        raise ValueError(
            f"max_tokens must be a multiple of {SCORE_ALIGNMENT},"
            f" got {max_tokens}, and {stride} of the buffers"
        )
    if n * lists > max_lists or max_tokens > stride:
        raise ValueError(
            f"buffers must be for {n * lists} lists of {max_tokens} tokens,"
            f" got {max_lists} of {stride}"
        )
    if buffers.importance.device != device:
        raise ValueError(f"buffers must be on {device}, got {buffers.importance.device}")
    operands, sizes = (lse, positions, heads), (sink_tokens, recent_tokens, budget_tokens)
    out, host_out = (selection, counts), (host_selection, host_counts)
    if not runs_kernel(scores):
        return top_k_tokens_reference(scores, *operands, shared, *sizes, ratio, *out, *host_out)
    launch = buffers.launch
    groups, found = (buffers.importance, buffers.maxima), (buffers.candidates, buffers.lengths)
    of_groups = (launch.chunk_tokens, launch.max_groups, launch.max_level)
    early = can_launch_early(scores)  # each while the kernel before it runs, if the GPU can
    importance_kernel[(-(-max_tokens // launch.chunk_tokens), lists, n)](
        scores,
        *operands,
        *groups,
        max_tokens,
        stride,
        *sizes,
        num_heads,
        lists,
        num_qo_heads,
        group_size,
        *of_groups,
        early,
        num_warps=launch.num_warps[0],
        **early_option(early),
    )
    candidates_kernel[(launch.segments, lists, n)](
        positions,
        *groups,
        *found,
        stride,
        *sizes,
        ratio,
        lists,
        *of_groups,
        launch.segments,
        launch.segment_tile,
        early,
        num_warps=launch.num_warps[1],
        **early_option(early),
    )
    select_tokens_kernel[(lists, n)](
        *operands,
        *found,
        *out,
        *map(pointer, host_out),
        stride,
        *sizes,
        ratio,
        num_heads,
        lists,
        out_lists,
        num_qo_heads,
        group_size,
        next_power_of_2(num_heads // lists * group_size),
        launch.segments,
        launch.segment_tile,
        launch.tile,
        early,
        num_warps=launch.num_warps[2],
        **early_option(early),
    )


def top_k_tokens_reference(
    scores: Tensor,
    lse: Tensor,
    positions: Tensor,
    heads: Tensor,
    shared: bool,
    sink_tokens: int,
    recent_tokens: int,
    budget_tokens: int,
    ratio: float | None,
    selection: Tensor,
    counts: Tensor,
    host_selection: Tensor | None,
    host_counts: Tensor | None,
) -> None:
    """`top_k_tokens` by a sort."""
    group_size = scores.shape[2]
    for row, position in enumerate(positions.tolist()):
        kv_len = position + 1
        first, last = sink_tokens, kv_len - recent_tokens
        k = budget_tokens - sink_tokens - recent_tokens
        if ratio is not None:
            k = min(k, max(math.ceil(ratio * kv_len) - sink_tokens - recent_tokens, 0))
        row_lse = lse[row].view(-1, group_size)[heads.long()]
        weights = torch.exp2(scores[row, :, :, :kv_len] - row_lse[..., None] * math.log2(math.e))
        importance = weights.flatten(0, 1).sum(0)[None] if shared else weights.sum(1)
        for i, of_tokens in enumerate(importance):
            target = (row, 0 if shared else int(heads[i]))
            of_list = row_lse if shared else row_lse[i]
            between = of_tokens[first:last]
            everything = kv_len <= budget_tokens
            tokens = torch.arange(kv_len, device=scores.device)
            if not everything:
                chosen = between.argsort(descending=True, stable=True)[:k].sort().values
                tokens = torch.cat((tokens[:first], first + chosen, tokens[last:]))
            is_bad = not (of_list.isfinite().all() and (everything or between.isfinite().all()))
            count = -1 if kv_len and is_bad else len(tokens)
            counts[target] = count
            selection[target][: max(count, 0)] = tokens[: max(count, 0)].int()
            if host_selection is not None and host_counts is not None:
                host_selection[target] = selection[target]
                host_counts[target] = count
