"""Residual addition and RMSNorm in one pass over the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_tensor
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl


@jit
def add_rms_norm_kernel(
    residual: tl.tensor,
    delta: tl.tensor,  # None: nothing to add
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row, which it holds in registers."""
    d = tl.arange(0, BLOCK)
    inside = d < HIDDEN_SIZE
    row = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE + d
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(residual + row, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + row, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row, x, mask=inside)
    x32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x32 * x32, 0) / HIDDEN_SIZE + eps)
    normed = (x32 * inverse).to(residual.dtype.element_ty).to(tl.float32)
    tl.store(out + row, (w * normed).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    """residual += delta; out = residual / sqrt(mean(residual**2) + eps) * weight.

    Values are rounded to the dtype where transformers rounds: after the sum, the normalisation and
    the product with the weight.

    Args:
        residual: [n, hidden_size], changed in place unless `delta` is None.
        delta: [n, hidden_size], the output of the projection before, or None.
        weight: [hidden_size].
        out: [n, hidden_size].
    """
    check_dtype("residual", residual)
    n, hidden_size = residual.shape
    for name, x in (("residual", residual), ("delta", delta), ("out", out)):
        if x is not None:
            check_tensor(name, x, (n, hidden_size), residual.dtype, residual.device)
    check_tensor("weight", weight, (hidden_size,), residual.dtype, residual.device)
    if not runs_kernel(residual):
        return add_rms_norm_reference(residual, delta, weight, eps, out)
    block = next_power_of_2(hidden_size)
    # One load of 16 bytes per thread and tensor, as far as the 1,024 threads of a program go.
    num_warps = min(32, max(1, block * residual.element_size() // (16 * 32)))
    add_rms_norm_kernel[(n,)](
        residual, delta, weight, out, eps, hidden_size, block, num_warps=num_warps
    )


@jit
def add_normed_kernel(
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row, which it holds in registers."""
    dtype = residual.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < HIDDEN_SIZE
    row = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE + d
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(delta + row, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(y * y, 0) / HIDDEN_SIZE + eps)
    normed = (w * (y * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(residual + row, (x + normed).to(dtype), mask=inside)


def add_normed(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> None:
    """residual += delta / sqrt(mean(delta**2) + eps) * weight, rounded as `add_rms_norm` rounds.

    Args:
        residual, delta: [n, hidden_size].
        weight: [hidden_size].
    """
    check_dtype("residual", residual)
    n, hidden_size = residual.shape
    for name, x, shape in (
        ("residual", residual, (n, hidden_size)),
        ("delta", delta, (n, hidden_size)),
        ("weight", weight, (hidden_size,)),
    ):
        check_tensor(name, x, shape, residual.dtype, residual.device)
    if not runs_kernel(residual):
        residual += rms_norm_reference(delta, weight, eps)
        return
    block = next_power_of_2(hidden_size)
    num_warps = min(32, max(1, block * residual.element_size() // (16 * 32)))
    add_normed_kernel[(n,)](residual, delta, weight, eps, hidden_size, block, num_warps=num_warps)


@jit
def rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,  # None: there is none
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row, which it holds in registers."""
    dtype = out.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + d
    y = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    if ROUNDS:
        y = y.to(dtype).to(tl.float32)
    if weight is not None:
        y *= tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    tl.store(out + row, y.to(dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: int = 0, rounds: bool = True
) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * (offset + weight), over the last dimension.

    Args:
        x: [..., size].
        weight: [size], of any dtype; None: 1.
        rounds: to x's dtype before the product, too.
    """
    check_dtype("x", x)
    size = x.shape[-1]
    if weight is not None and weight.shape != (size,):
        raise ValueError(f"weight must be {[size]}, got {list(weight.shape)}")
    if not runs_kernel(x):
        return rms_norm_by_torch(x, weight, eps, offset=offset, rounds=rounds)
    x = x.contiguous()
    out, block = torch.empty_like(x), next_power_of_2(size)
    num_warps = min(32, max(1, block * x.element_size() // (16 * 32)))
    rms_norm_kernel[(x.numel() // size,)](
        x, weight, out, eps, size, offset, rounds, block, num_warps=num_warps
    )
    return out


def rms_norm_by_torch(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: int = 0, rounds: bool = True
) -> Tensor:
    """`rms_norm` without its kernel."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y.to(x.dtype).float() if rounds else y
    return (y if weight is None else y * (weight.float() + offset)).to(x.dtype)


def add_rms_norm_reference(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    """`add_rms_norm` by torch."""
    if delta is not None:
        residual += delta
    out.copy_(rms_norm_reference(residual, weight, eps))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, rounded where transformers rounds."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
