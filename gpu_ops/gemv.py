"""One row through a linear layer, with what comes before and after it in the same kernel.

A decode step of one sequence reads every weight once and computes next to nothing: its linear
layers run at the speed of memory, and each further kernel between them costs as much as reading
some megabytes. So RMSNorm happens where the row is read, and SwiGLU and the residual sum where the
result is written. Of more rows than one, a matrix product is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpu_ops.checks import check_dtype, check_gate, check_tensor
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.rms_norm import rms_norm_reference
from gpu_ops.silu_mul import activated, gate_reference

# One warp for four outputs: with more warps than one, every load of x waits for all of them; with
# fewer outputs the reads of x weigh too much, with more the small layers have too few programs.
_ROWS_PER_PROGRAM = 4
_BYTES_PER_LOAD = 1024  # of each weight row


@jit
def row_products(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,  # None: no norm
    eps: tl.tensor,
    n: tl.tensor,
    inside_n: tl.tensor,
    up_rows: tl.tensor,
    dtype: tl.constexpr,
    K: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of rows n [BLOCK_N] of the weight and x, or its RMSNorm; with GLU of rows
    n + up_rows, too: float32 [BLOCK_N] each."""
    inverse = 1.0
    if norm_weight is not None:
        d = tl.arange(0, BLOCK_X)
        whole = tl.load(x + d, mask=d < K, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside_k = k < K
        row = tl.load(x + k, mask=inside_k, other=0.0).to(tl.float32)
        if norm_weight is not None:
            w = tl.load(norm_weight + k, mask=inside_k, other=0.0).to(tl.float32)
            row = ((row * inverse).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        at = weight + n[:, None] * K + k[None, :]
        inside = inside_n[:, None] & inside_k[None, :]
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * row[None, :]
        if GLU:
            at += up_rows.to(tl.int64) * K
            tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
            ups += tile.to(tl.float32) * row[None, :]
    return tl.sum(sums, 1), tl.sum(ups, 1)


@jit
def glu(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """f(gate) * up of float32, each rounded to the dtype before and after."""
    gate = activated(gate.to(dtype).to(tl.float32), GELU).to(dtype)
    return (gate.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@jit
def gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,  # None: there is none; so with the next two
    norm_weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    num_out: tl.tensor,
    K: tl.constexpr,
    GLU: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
) -> None:
    """One program per BLOCK_N outputs; with GLU rows i, i + num_out are gate and up of output i."""
    dtype = out.dtype.element_ty
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < num_out
    y, up = row_products(
        x, weight, norm_weight, eps, n, inside_n, num_out, dtype, K, GLU, BLOCK_N, BLOCK_K, BLOCK_X
    )
    if bias is not None:
        y += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)
        if GLU:
            up += tl.load(bias + num_out + n, mask=inside_n, other=0.0).to(tl.float32)
    y = glu(y, up, GELU, dtype) if GLU else y.to(dtype)
    if residual is not None:
        added = tl.load(residual + n, mask=inside_n, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + added).to(dtype)
    tl.store(out + n, y, mask=inside_n)


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    glu: bool = False,
    gate: str = "silu",
    residual: Tensor | None = None,
) -> None:
    """out = g(f(x) @ weight.T + bias) + residual.

    f is RMSNorm (`norm`) or nothing, g a gate's activation times the others (`glu`) or nothing.
    Values are rounded to the dtype where transformers rounds: after the norm, its weight, the
    projection, the gate, the product and the sum.

    Args:
        x: [1, in_features].
        weight: [out_features, in_features], or with `glu` [2 * out_features, in_features], the gate
            above the up projection.
        out: [1, out_features]; may be `residual` itself. Where nothing but x, weight and bias is
            given it may be float32: a summand that is rounded later.
        bias: [rows of weight].
        norm: (weight [in_features], eps) of an RMSNorm of x.
        gate: the activation of `glu`, "silu" or "gelu_tanh".
        residual: [1, out_features], added last.
    """
    check_dtype("x", x)
    is_gelu = check_gate(gate)
    dtype, device = x.dtype, x.device
    num_out, num_in = out.shape[-1], x.shape[-1]
    num_rows = num_out * (2 if glu else 1)
    check_tensor("x", x, (1, num_in), dtype, device)
    is_summand = norm is None and residual is None and not glu
    out_dtype = torch.float32 if is_summand and out.dtype == torch.float32 else dtype
    check_tensor("out", out, (1, num_out), out_dtype, device)
    check_tensor("weight", weight, (num_rows, num_in), dtype, device)
    if bias is not None:
        check_tensor("bias", bias, (num_rows,), dtype, device)
    if norm is not None:
        check_tensor("norm", norm[0], (num_in,), dtype, device)
    if residual is not None:
        check_tensor("residual", residual, (1, num_out), dtype, device)
    if not runs_kernel(x):
        if out.dtype != dtype:
            x, weight = x.to(out.dtype), weight.to(out.dtype)
            bias = None if bias is None else bias.to(out.dtype)
        out.copy_(gemv_reference(x, weight, bias, norm, glu, residual, gate))
        return
    norm_weight, eps = (None, 0.0) if norm is None else norm
    block_n, block_k, num_warps = launch_shape(num_in, x.element_size(), glu=glu)
    gemv_kernel[(-(-num_out // block_n),)](
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        eps,
        num_out,
        num_in,
        glu,
        is_gelu,
        block_n,
        block_k,
        next_power_of_2(num_in),
        num_warps=num_warps,
    )


def launch_shape(num_in: int, item_bytes: int, *, glu: bool = False) -> tuple[int, int, int]:
    """Outputs of a program, inputs of one of its loads, and its warps."""
    row_bytes = _BYTES_PER_LOAD // (2 if glu else 1)  # two rows of weights for each output
    return _ROWS_PER_PROGRAM, min(next_power_of_2(num_in), row_bytes // item_bytes), 1


def gemv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    glu: bool,
    residual: Tensor | None,
    kind: str = "silu",
) -> Tensor:
    """`gemv` by torch."""
    if norm is not None:
        x = rms_norm_reference(x, *norm)
    y = functional.linear(x, weight, bias)
    if glu:
        gate, up = y.chunk(2, dim=-1)
        y = gate_reference(gate, kind) * up
    return y if residual is None else y + residual
