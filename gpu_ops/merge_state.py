"""The exact merge of the GPU's and the CPU's part of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_reachable, check_sinks, check_tensor
from gpu_ops.launch import jit, next_power_of_2, pointer, runs_kernel, tl


@jit
def merge_state_kernel(
    o_a: tl.tensor,
    lse_a: tl.tensor,
    o_b: tl.tensor,
    lse_b: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,  # None: heads have none
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and query head."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < HEAD_DIM
    # Not after the lse says that it counts: that would be a second trip to the host's memory.
    part_a = tl.load(o_a + head * HEAD_DIM + d, mask=inside, other=0.0)
    part_b = tl.load(o_b + head * HEAD_DIM + d, mask=inside, other=0.0)
    a, b = tl.load(lse_a + head), tl.load(lse_b + head)
    none = float("-inf")
    is_complete = b == float("inf")
    # An lse that is NaN counts: what is wrong with the numbers has to show in `out`.
    has_a = (a != none) & ~is_complete
    has_b = b != none
    # Below, exponents are of differences to the larger of the parts that count, or of 0.
    a, b = tl.where(has_a, a, none), tl.where(is_complete, 0.0, b)
    largest = tl.maximum(a, b)
    largest = tl.where(largest > none, largest, 0.0)
    weight_a, weight_b = tl.exp(a - largest), tl.exp(b - largest)
    total = weight_a + weight_b
    if sinks is not None:
        sink = tl.load(sinks + head % NUM_HEADS)
        total += tl.where(is_complete, 0.0, tl.exp(sink - largest))
    total = tl.where(total == 0, 1.0, total)

    # A part that does not count may be anything: it may never have been written.
    part_a, part_b = tl.where(has_a, part_a, 0.0), tl.where(has_b, part_b, 0.0)
    o = part_a * (weight_a / total) + part_b * (weight_b / total)
    tl.store(out + head * HEAD_DIM + d, o.to(out.dtype.element_ty), mask=inside)


def merge_state(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """out = the softmax over what both parts attended to.

    A part whose lse is -inf attended to nothing, and its o may be anything; two give 0. Where
    lse_b is +inf, o_b is the complete answer and part a is ignored (a bypassed head of LFPS). Else
    NaN and infinity in a part that counts give NaN.

    Args:
        o_a: float32 [n, num_qo_heads * head_dim], normalised.
        lse_a: float32 [n, num_qo_heads], natural log.
        o_b, lse_b: as the above; may be pinned host memory that the CPU has written.
        out: [n, num_qo_heads * head_dim], float32, float16 or bfloat16.
        sinks: float32 [num_qo_heads], logits that join each softmax, but not what is complete, and
            have no value; or None.
    """
    check_dtype("out", out)
    device, shape = o_a.device, o_a.shape
    heads = lse_a.shape[1]
    if shape[1] % heads:
        raise ValueError(f"o_a must have {heads} heads, got {shape[1]} columns")
    check_tensor("o_a", o_a, shape, torch.float32, device)
    check_tensor("lse_a", lse_a, (shape[0], heads), torch.float32, device)
    check_reachable("o_b", o_b, shape, torch.float32, device)
    check_reachable("lse_b", lse_b, (shape[0], heads), torch.float32, device)
    check_tensor("out", out, shape, out.dtype, device)
    check_sinks(sinks, heads, device)
    if not runs_kernel(o_a):
        return merge_state_reference(o_a, lse_a, o_b, lse_b, out, sinks)
    head_dim = shape[1] // heads
    merge_state_kernel[(shape[0] * heads,)](
        o_a,
        lse_a,
        pointer(o_b),
        pointer(lse_b),
        out,
        sinks,
        heads,
        head_dim,
        next_power_of_2(head_dim),
        num_warps=1,
    )


def merge_state_reference(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """`merge_state` by torch."""
    parts = torch.stack((o_a, o_b)).view(2, *lse_a.shape, -1)
    lse = torch.stack((lse_a, lse_b))
    complete = lse_b == float("inf")
    lse[0].masked_fill_(complete, float("-inf"))
    lse[1].masked_fill_(complete, 0.0)
    parts.masked_fill_((lse == float("-inf"))[..., None], 0.0)
    # Not by the sum's lse: in float32 the difference to a large one is off by its last bit.
    largest = lse.amax(0).clamp_min(-1e30)
    weights = (lse - largest).exp()
    total = weights.sum(0)
    if sinks is not None:
        total += (sinks - largest).exp().masked_fill_(complete, 0.0)
    weights /= total.masked_fill_(lse.isinf().all(0), 1.0)
    out.copy_((weights[..., None] * parts).sum(0).view(out.shape))
