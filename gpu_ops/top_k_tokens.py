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

from gpu_ops.checks import check_reachable, check_tensor
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, pointer, runs_kernel, tl
from gpu_ops.top_k_candidates import (
    SCORE_ALIGNMENT,
    SIZES,
    TopKBuffers,
    candidates_kernel,
    importance_kernel,
    num_chosen,
    segment_length,
    take,
)


@jit
def join_segments(
    of_list: tl.tensor,
    of_segments: tl.tensor,  # candidates of each segment
    length: tl.tensor,
    total: tl.tensor,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Close the gaps between the segments' candidates, in place."""
    segment = tl.arange(0, SEGMENTS)
    for start in range(0, total, TILE):
        j = start + tl.arange(0, TILE)
        gap = tl.zeros([TILE], tl.int32)
        for i in tl.static_range(1, SEGMENTS):
            before = tl.sum(tl.where(segment < i, of_segments, 0), 0)
            gap = tl.where(j >= before, i * length - before, gap)
        x = tl.load(of_list + j + gap, mask=j < total)
        tl.debug_barrier()  # nothing moves up, but within a tile one may take another's place
        tl.store(of_list + j, x, mask=j < total)
    tl.debug_barrier()


@jit
def count_at_least(
    value: tl.tensor,
    first_bits: tl.tensor,  # importance of the first TILE candidates
    of_list: tl.tensor,
    total: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Candidates whose importance reaches the value."""
    count = tl.sum((first_bits >= value).to(tl.int32), 0)
    for start in range(TILE, total, TILE):
        j = start + tl.arange(0, TILE)
        bits = (tl.load(of_list + j, mask=j < total, other=-1) >> 32).to(tl.int32)
        count += tl.sum((bits >= value).to(tl.int32), 0)
    return count


@jit_for_any(*SIZES)
def select_tokens_kernel(
    lse: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    candidates: tl.tensor,
    lengths: tl.tensor,
    selection: tl.tensor,
    counts: tl.tensor,
    host_selection: tl.tensor,  # both None, or host memory
    host_counts: tl.tensor,
    importance_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    RATIO: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LISTS: tl.constexpr,
    OUT_LISTS: tl.constexpr,  # of a row of selection
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # at least the query heads of a list
    SEGMENTS: tl.constexpr,
    SEGMENT_TILE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per list and row."""
    HEADS_OF_LIST: tl.constexpr = NUM_HEADS // LISTS
    list_idx = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    last = kv_len - recent_tokens
    k = num_chosen(kv_len, sink_tokens, recent_tokens, budget_tokens, RATIO)
    target = row * OUT_LISTS
    if OUT_LISTS > 1:
        target += tl.load(heads + list_idx)
    tokens = selection + target * budget_tokens

    q = tl.arange(0, BLOCK_Q)
    present = q < HEADS_OF_LIST * GROUP_SIZE
    head = tl.load(heads + list_idx + q // GROUP_SIZE, mask=present, other=0)
    of_head = lse + row * NUM_QO_HEADS + head * GROUP_SIZE + q % GROUP_SIZE
    largest_lse = tl.abs(tl.load(of_head, mask=present, other=0.0))
    is_bad = tl.sum(tl.where(largest_lse < float("inf"), 0, 1), 0) > 0

    j = tl.arange(0, TILE)
    count = kv_len
    if kv_len > budget_tokens:
        length = segment_length(last, SEGMENTS, SEGMENT_TILE)
        segment = tl.arange(0, SEGMENTS)
        of_list = candidates + (row * LISTS + list_idx) * importance_stride
        of_segments = tl.load(
            lengths + (row * LISTS + list_idx) * SEGMENTS + segment,
            mask=segment * length < last,
            other=0,
        )
        total = tl.sum(of_segments, 0)
        join_segments(of_list, of_segments, length, total, SEGMENTS, TILE)
        x = tl.load(of_list + j, mask=j < total, other=-1)
        bits, token = (x >> 32).to(tl.int32), x.to(tl.int32)
        high = tl.max(bits, 0)
        low = tl.min(tl.where(j < total, bits, high), 0)
        for start in range(TILE, total, TILE):
            inside = start + j < total
            other = (tl.load(of_list + start + j, mask=inside, other=-1) >> 32).to(tl.int32)
            high = tl.maximum(high, tl.max(other, 0))
            low = tl.minimum(low, tl.min(tl.where(inside, other, high), 0))
        is_bad = is_bad | (high == 0x7F800000)

        # Invariant: k candidates or more reach `low`; `above` of them, fewer than k, exceed `high`.
        above = tl.zeros([], tl.int32)
        middle = low + 1  # first: are the lowest ones, perhaps many ties, needed at all?
        while low < high:
            reach = count_at_least(middle, bits, of_list, total, TILE)
            if reach > k:
                low = middle
            elif reach < k:
                high = middle - 1
                above = reach
            else:  # exactly these
                low = middle - 1
                high = middle - 1
                above = reach
            middle = low + (high - low + 1) // 2

        ties = k - above  # of those that equal `low`, the first
        written = sink_tokens
        for start in range(0, total, TILE):
            if start > 0:
                x = tl.load(of_list + start + j, mask=start + j < total, other=-1)
                bits, token = (x >> 32).to(tl.int32), x.to(tl.int32)
            taken, place, found, num_ties = take(bits, low, ties)
            tl.store(
                tokens + written + place, token, mask=taken & (written + place < budget_tokens)
            )
            written += found
            ties -= num_ties
        count = sink_tokens + k + recent_tokens
        for start in range(0, sink_tokens, TILE):
            tl.store(tokens + start + j, start + j, mask=start + j < sink_tokens)
        for start in range(0, recent_tokens, TILE):
            recent = start + j
            tl.store(tokens + sink_tokens + k + recent, last + recent, mask=recent < recent_tokens)
    else:
        for start in range(0, kv_len, TILE):
            tl.store(tokens + start + j, start + j, mask=start + j < kv_len)

    count = tl.where(is_bad & (kv_len > 0), -1, count)
    tl.store(counts + target, count)
    if host_selection is not None:
        tl.debug_barrier()  # the list is complete; whole vectors of it go to the host
        for start in range(0, count, TILE):
            inside = start + j < count
            token = tl.load(tokens + start + j, mask=inside, other=0)
            tl.store(host_selection + target * budget_tokens + start + j, token, mask=inside)
        tl.store(host_counts + target, count)


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
    if scores.dim() != 4:
        raise ValueError(f"scores must be [n, H, group_size, max_tokens], got {list(scores.shape)}")
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
    if not runs_kernel(scores):
        return top_k_tokens_reference(
            scores,
            lse,
            positions,
            heads,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            budget_tokens=budget_tokens,
            shared=shared,
            selection=selection,
            counts=counts,
            host_selection=host_selection,
            host_counts=host_counts,
            ratio=ratio,
        )
    launch = buffers.launch
    sizes = (sink_tokens, recent_tokens, budget_tokens)
    importance_kernel[(-(-max_tokens // launch.chunk_tokens), lists, n)](
        scores,
        lse,
        positions,
        heads,
        buffers.importance,
        buffers.maxima,
        max_tokens,
        stride,
        *sizes,
        num_heads,
        lists,
        num_qo_heads,
        group_size,
        launch.chunk_tokens,
        launch.max_groups,
        launch.max_level,
        num_warps=launch.num_warps[0],
    )
    candidates_kernel[(launch.segments, lists, n)](
        positions,
        buffers.importance,
        buffers.maxima,
        buffers.candidates,
        buffers.lengths,
        stride,
        *sizes,
        ratio,
        lists,
        launch.chunk_tokens,
        launch.max_groups,
        launch.max_level,
        launch.segments,
        launch.segment_tile,
        num_warps=launch.num_warps[1],
    )
    select_tokens_kernel[(lists, n)](
        lse,
        positions,
        heads,
        buffers.candidates,
        buffers.lengths,
        selection,
        counts,
        None if host_selection is None else pointer(host_selection),
        None if host_counts is None else pointer(host_counts),
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
        num_warps=launch.num_warps[2],
    )


def top_k_tokens_reference(
    scores: Tensor,
    lse: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    sink_tokens: int,
    recent_tokens: int,
    budget_tokens: int,
    shared: bool,
    selection: Tensor,
    counts: Tensor,
    host_selection: Tensor | None = None,
    host_counts: Tensor | None = None,
    ratio: float | None = None,
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
            if everything:
                tokens = torch.arange(kv_len, device=scores.device)
            else:
                chosen = between.argsort(descending=True, stable=True)[:k].sort().values
                ends = torch.arange(kv_len, device=scores.device)
                tokens = torch.cat((ends[:first], first + chosen, ends[last:]))
            is_bad = not (of_list.isfinite().all() and (everything or between.isfinite().all()))
            count = -1 if kv_len and is_bad else len(tokens)
            counts[target] = count
            selection[target][: max(count, 0)] = tokens[: max(count, 0)].int()
            if host_selection is not None and host_counts is not None:
                host_selection[target] = selection[target]
                host_counts[target] = count
