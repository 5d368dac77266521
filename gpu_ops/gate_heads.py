"""Attention with a gate for each element of its output: what lies before it and behind it."""

from __future__ import annotations

from torch import Tensor

from gpu_ops.checks import check_dtype, check_tensor
from gpu_ops.launch import jit, runs_kernel, tl

_THREADS = 128


@jit
def split_gates_kernel(
    projected: tl.tensor,
    qkv: tl.tensor,
    gates: tl.tensor,
    row_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and block of columns."""
    GATES: tl.constexpr = NUM_HEADS * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    x = tl.load(projected + row * row_stride + column, mask=exists, other=0.0)
    head, d = column // (2 * HEAD_DIM), column % (2 * HEAD_DIM)
    is_rest = column >= 2 * GATES
    is_gate = (d >= HEAD_DIM) & (column < 2 * GATES)
    to = tl.where(is_rest, column - GATES, head * HEAD_DIM + d)
    tl.store(qkv + row * (SIZE - GATES) + to, x, mask=exists & (is_rest | (d < HEAD_DIM)))
    tl.store(gates + row * GATES + head * HEAD_DIM + d - HEAD_DIM, x, mask=exists & is_gate)


def split_gates(projected: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Projections without their gates, and the gates.

    Args:
        projected: [n, num_heads * 2 * head_dim + rest], of each head its query, then its gate;
            then what comes behind, keys and values. Rows may be apart.

    Returns:
        [n, num_heads * head_dim + rest] and [n, num_heads * head_dim].
    """
    check_dtype("projected", projected)
    n, size = projected.shape
    num_gates = num_heads * head_dim
    if size < 2 * num_gates or projected.stride(1) != 1:
        raise ValueError(
            f"projected must be contiguous rows of at least {2 * num_gates} elements, got {size}, "
            f"of strides {projected.stride()}"
        )
    qkv, gates = (projected.new_empty(n, width) for width in (size - num_gates, num_gates))
    if not runs_kernel(projected):
        heads = projected[:, : 2 * num_gates].view(n, num_heads, 2, head_dim)
        qkv[:, :num_gates].view(n, num_heads, head_dim).copy_(heads[:, :, 0])
        qkv[:, num_gates:].copy_(projected[:, 2 * num_gates :])
        gates.view(n, num_heads, head_dim).copy_(heads[:, :, 1])
        return qkv, gates
    block = _THREADS * 16 // projected.element_size()  # one load of 16 bytes per thread
    split_gates_kernel[(n, -(-size // block))](
        projected,
        qkv,
        gates,
        projected.stride(0),
        num_heads,
        head_dim,
        size,
        block,
        num_warps=_THREADS // 32,
    )
    return qkv, gates


@jit
def gate_heads_kernel(
    attended: tl.tensor, gates: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program per block of elements."""
    dtype = attended.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(attended + i, mask=i < size, other=0.0).to(tl.float32)
    gate = tl.load(gates + i, mask=i < size, other=0.0).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(attended + i, (x * gate).to(dtype), mask=i < size)


def gate_heads(attended: Tensor, gates: Tensor) -> Tensor:
    """attended *= sigmoid(gates), which is rounded to the dtype; both of one shape."""
    check_dtype("attended", attended)
    for name, x in (("attended", attended), ("gates", gates)):
        check_tensor(name, x, attended.shape, attended.dtype, attended.device)
    if not runs_kernel(attended):
        return attended.mul_(gates.sigmoid())
    block = _THREADS * 16 // attended.element_size()
    gate_heads_kernel[(-(-attended.numel() // block),)](
        attended, gates, attended.numel(), block, num_warps=_THREADS // 32
    )
    return attended
