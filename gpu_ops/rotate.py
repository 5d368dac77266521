"""Rotary embedding of a prefill slice."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_head_dim, check_rotary_dim, check_tensor
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl


@jit
def rotate_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least ROTARY_DIM // 2
    BLOCK_REST: tl.constexpr,  # at least HEAD_DIM - ROTARY_DIM
) -> None:
    """One program per token, with all its heads: the two halves that are rotated, the rest."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    dtype = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    # Heads may be far apart: a stride fits 32 bits, a few of them may not.
    h = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < NUM_HEADS) & (d < HALF)
    row = x + token * x_token_stride + h * x_head_stride + d
    low = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)
    angle, of_half = token * ROTARY_DIM + d, d < HALF
    low_cos = low * tl.load(cos + angle, mask=of_half, other=0.0).to(tl.float32)
    low_sin = high * tl.load(sin + angle, mask=of_half, other=0.0).to(tl.float32)
    high_cos = high * tl.load(cos + angle + HALF, mask=of_half, other=0.0).to(tl.float32)
    high_sin = low * tl.load(sin + angle + HALF, mask=of_half, other=0.0).to(tl.float32)
    target = out + (token * NUM_HEADS + h) * HEAD_DIM + d
    low = low_cos.to(dtype).to(tl.float32) - low_sin.to(dtype).to(tl.float32)
    high = high_cos.to(dtype).to(tl.float32) + high_sin.to(dtype).to(tl.float32)
    tl.store(target, low.to(dtype), mask=inside)
    tl.store(target + HALF, high.to(dtype), mask=inside)
    if ROTARY_DIM < HEAD_DIM:
        e = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
        inside = (h < NUM_HEADS) & (e < HEAD_DIM)
        rest = tl.load(x + token * x_token_stride + h * x_head_stride + e, mask=inside, other=0.0)
        tl.store(out + (token * NUM_HEADS + h) * HEAD_DIM + e, rest, mask=inside)


def rotate_tokens(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, rounded to the dtype after each product and the sum.

    Args:
        x: [n, num_heads, head_dim]; any strides but a unit stride in the last dimension.
        cos, sin: [n, rotary_dim], of the first elements of each head; the others stay as they are.

    Returns:
        [n, num_heads, head_dim], contiguous.
    """
    check_dtype("x", x)
    n, num_heads, head_dim = x.shape
    check_head_dim(head_dim)
    if x.stride(2) != 1:
        raise ValueError(f"rows of x must be contiguous, got strides {x.stride()}")
    rotary_dim = check_rotary_dim(cos, head_dim)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (n, rotary_dim), x.dtype, x.device)
    if not runs_kernel(x):
        return rotate_reference(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_kernel[(n,)](
        x,
        cos,
        sin,
        out,
        *x.stride()[:2],
        num_heads,
        head_dim,
        rotary_dim,
        next_power_of_2(num_heads),
        next_power_of_2(rotary_dim // 2),
        next_power_of_2(max(1, head_dim - rotary_dim)),
        num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of a product
    )
    return out


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_tokens` by torch."""
    width = cos.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    low, high = x.chunk(2, dim=-1)
    rotated = x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return torch.cat((rotated, rest), dim=-1)
