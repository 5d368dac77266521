"""A layer whose KV is on the host: the GPU's part of attention, and the exact merge of both parts.

The GPU attends to the sink tokens and the recent window while the CPU attends to what its policy
chose among the rest. One kernel does the first, waits for the second and merges them.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_group, check_head_dim, check_reachable, check_tensor
from gpu_ops.flags import acquire, check_flag_and_counter, lower_last, mark_time
from gpu_ops.launch import is_interpreted, jit, next_power_of_2, pointer, runs_kernel, tl
from gpu_ops.online_softmax import MIN_GROUP, NUM_STAGES, attend_tile, load_query, tile_tokens


@jit
def window_attention_kernel(
    query: tl.tensor,
    window: tl.tensor,
    positions: tl.tensor,
    host_out: tl.tensor,
    host_lse: tl.tensor,
    flag: tl.tensor,  # None, as the next two: the host's part is there
    counter: tl.tensor,
    times: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,  # sm_scale * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One program per row and KV head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    # Slots fill in order and stay full, so the tokens inside are the first so many slots.
    num_tokens = tl.minimum(tl.load(positions + row) + 1, WINDOW_TOKENS).to(tl.int32)
    first_head = (row * NUM_KV_HEADS + kv_head) * GROUP_SIZE
    q = load_query(query, first_head, GROUP_SIZE, HEAD_DIM, BLOCK_G, BLOCK_D)
    keys = window + (row * 2 * NUM_KV_HEADS + kv_head) * (WINDOW_TOKENS * HEAD_DIM)
    values = keys + NUM_KV_HEADS * WINDOW_TOKENS * HEAD_DIM

    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_tokens, BLOCK_T):
        row_max, row_sum, acc = attend_tile(
            q,
            keys + start * HEAD_DIM,
            values + start * HEAD_DIM,
            num_tokens - start,
            scale,
            row_max,
            row_sum,
            acc,
            HEAD_DIM,
            BLOCK_T,
            BLOCK_D,
        )

    if flag is not None:
        if times is not None:
            mark_time(times, row + kv_head)
        acquire(flag, INTERPRETED)
        if times is not None:
            mark_time(times + 1, row + kv_head)

    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside = (g < GROUP_SIZE)[:, None] & (d < HEAD_DIM)[None, :]
    offsets = (first_head + g)[:, None] * HEAD_DIM + d[None, :]
    none = float("-inf")
    host_lse2 = tl.load(host_lse + first_head + g, mask=g < GROUP_SIZE, other=none)
    host_part = tl.load(host_out + offsets, mask=inside, other=0.0)
    if flag is not None:
        lower_last(flag, counter, tl.num_programs(0) * tl.num_programs(1))

    # Base 2 from here on. A part that does not count may be anything: nobody has written it.
    is_complete = host_lse2 == float("inf")
    has_host = host_lse2 > none
    host_lse2 = tl.where(is_complete, 0.0, host_lse2 * 1.4426950408889634)
    host_part = tl.where(has_host[:, None], host_part, 0.0)
    # The window of an inactive row is empty.
    row_max = tl.where(is_complete, none, row_max)
    largest = tl.maximum(row_max, host_lse2)
    largest = tl.where(largest > none, largest, 0.0)
    decay, host_weight = tl.exp2(row_max - largest), tl.exp2(host_lse2 - largest)
    total = row_sum * decay + host_weight
    total = tl.where(total > 0, total, 1.0)
    o = acc * (decay / total)[:, None] + host_part * (host_weight / total)[:, None]
    tl.store(out + offsets, o.to(out.dtype.element_ty), mask=inside)


def window_attention(
    query: Tensor,
    window: Tensor,
    positions: Tensor,
    *,
    sm_scale: float,
    host_out: Tensor,
    host_lse: Tensor,
    out: Tensor,
    flag: Tensor | None = None,
    counter: Tensor | None = None,
    times: Tensor | None = None,
) -> None:
    """out = attention to the window's tokens and to what the host attended to, one softmax.

    With kv_len = position + 1 the window holds the tokens [0, min(sink_tokens, kv_len)) and
    [max(sink_tokens, kv_len - recent_tokens), kv_len).

    Args:
        query: [n, num_qo_heads * head_dim].
        window: [n, 2, num_kv_heads, sink_tokens + recent_tokens, head_dim] as `rope_publish` fills
            it, the row's own token included. How many of its tokens are sinks makes no difference
            here: they fill it in order, and attention does not ask in which order it was refilled.
        positions: int64 [n], -1 for an inactive row, whose window counts as empty.
        host_out: float32 [n, num_qo_heads * head_dim], normalised; may be pinned host memory.
        host_lse: float32 [n, num_qo_heads], natural log; as host_out. -inf: the host attended to
            nothing, and host_out is anything. +inf: host_out is the complete answer, and the window
            does not count (a bypassed head of LFPS).
        out: [n, num_qo_heads * head_dim]; 0 where neither part has attended to anything.
        flag: int32 in pinned host memory: up when the host's part is there. The kernel waits for it
            after its own part, and lowers it.
        counter: with `flag`: int32 [1], 0 before and after; no two launches at a time share it.
        times: with `flag`, int64 [2] for the GPU's clock in ns before and after it waited.
    """
    check_dtype("query", query)
    if window.dim() != 5:
        raise ValueError(
            "window must be [n, 2, num_kv_heads, window_tokens, head_dim],"
            f" got {list(window.shape)}"
        )
    n, _, num_kv_heads, window_tokens, head_dim = window.shape
    num_qo_heads = host_lse.shape[1]
    device = query.device
    check_head_dim(head_dim)
    group_size = check_group(num_qo_heads, num_kv_heads)
    shape = (n, num_qo_heads * head_dim)
    check_tensor("query", query, shape, query.dtype, device)
    window_shape = (n, 2, num_kv_heads, window_tokens, head_dim)
    check_tensor("window", window, window_shape, query.dtype, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_reachable("host_out", host_out, shape, torch.float32, device)
    check_reachable("host_lse", host_lse, (n, num_qo_heads), torch.float32, device)
    check_dtype("out", out)
    check_tensor("out", out, shape, out.dtype, device)
    check_flag_and_counter(flag, counter, device)
    if times is not None:
        check_tensor("times", times, (2,), torch.int64, device)
    if not runs_kernel(query):
        if flag is not None:
            _wait_for(flag, times)
        return window_attention_reference(
            query,
            window,
            positions,
            sm_scale=sm_scale,
            host_out=host_out,
            host_lse=host_lse,
            out=out,
        )
    window_attention_kernel[(n, num_kv_heads)](
        query,
        window,
        positions,
        pointer(host_out),
        pointer(host_lse),
        None if flag is None else pointer(flag),
        counter,
        times,
        out,
        sm_scale * math.log2(math.e),
        num_kv_heads,
        group_size,
        head_dim,
        window_tokens,
        max(MIN_GROUP, next_power_of_2(group_size)),
        tile_tokens(head_dim, query.element_size()),
        next_power_of_2(head_dim),
        is_interpreted(),
        num_warps=4,
        num_stages=NUM_STAGES,
    )


def window_attention_reference(
    query: Tensor,
    window: Tensor,
    positions: Tensor,
    *,
    sm_scale: float,
    host_out: Tensor,
    host_lse: Tensor,
    out: Tensor,
) -> None:
    """`window_attention` by torch, in float32; the host's part is there."""
    window_tokens, head_dim = window.shape[3:]
    window_out = torch.zeros_like(host_out)
    window_lse = torch.full_like(host_lse, float("-inf"))
    for row, position in enumerate(positions.tolist()):
        if position >= 0:
            kv = window[row, :, :, : min(position + 1, window_tokens)]
            o, lse = attend_reference(query[row].view(-1, head_dim), kv[0], kv[1], sm_scale)
            window_out[row], window_lse[row] = o.flatten(), lse
    out.copy_(merge_states(window_out, window_lse, host_out, host_lse))


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Tensor:
    """The softmax over what both parts attended to; lse_b as `window_attention`'s host_lse.

    Args:
        o_a, o_b: [n, num_heads * head_dim], normalised.
        lse_a, lse_b: [n, num_heads], natural log.
    """
    parts = torch.stack((o_a, o_b)).view(2, *lse_a.shape, -1)
    lse = torch.stack((lse_a, lse_b))
    complete = lse_b == float("inf")
    lse[0].masked_fill_(complete, float("-inf"))
    lse[1].masked_fill_(complete, 0.0)
    parts.masked_fill_((lse == float("-inf"))[..., None], 0.0)
    # Not by the sum's lse: in float32 the difference to a large one is off by its last bit.
    weights = (lse - lse.amax(0).clamp_min(-1e30)).exp()
    weights /= weights.sum(0).masked_fill_(lse.isinf().all(0), 1.0)
    return (weights[..., None] * parts).sum(0).view(o_a.shape)


def _wait_for(flag: Tensor, times: Tensor | None) -> None:
    """What the kernel does, on a thread that stands for the GPU."""
    start = time.perf_counter_ns()
    while not flag[0]:
        time.sleep(0)
    flag[0] = 0
    if times is not None:
        times[0], times[1] = start, time.perf_counter_ns()


def attend_reference(
    q: Tensor, keys: Tensor, values: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """float32 o [num_qo_heads, head_dim] and lse [num_qo_heads] of one token's queries q.

    Args:
        q: [num_qo_heads, head_dim].
        keys, values: [num_kv_heads, kv_len, head_dim].
    """
    grouped = q.float().view(keys.shape[0], -1, q.shape[1])
    scores = grouped @ keys.float().transpose(1, 2) * sm_scale
    lse = torch.logsumexp(scores, dim=-1)
    o = (scores - lse[..., None]).exp() @ values.float()
    return o.view(q.shape), lse.flatten()
