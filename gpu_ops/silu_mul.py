"""The activation of a gated MLP: silu(gate) * up, or GELU's approximation by tanh for SiLU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpu_ops.checks import check_dtype, check_gate, check_tensor
from gpu_ops.launch import jit, runs_kernel, tl

_THREADS = 128


@jit
def activated(x: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """SiLU of float32 x, or with GELU x * (1 + tanh(z / 2)) / 2, which is x * sigmoid(z)."""
    z = x
    if GELU:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-z))


@jit
def silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    gate = activated(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate * up).to(out.dtype.element_ty), mask=inside)


@jit
def activate_kernel(
    gate: tl.tensor, up: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr, GELU: tl.constexpr
) -> None:
    """One program per block of elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + i, mask=i < size, other=0.0).to(tl.float32)
    y = tl.load(up + i, mask=i < size, other=0.0).to(tl.float32)
    x = activated(x, GELU).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(gate + i, (x * y).to(gate.dtype.element_ty), mask=i < size)


def activate(gate: Tensor, up: Tensor, kind: str = "silu") -> None:
    """gate = f(gate) * up, rounded to the dtype after each of the two; both of one shape.

    Args:
        kind: f, "silu" or "gelu_tanh".
    """
    is_gelu = check_gate(kind)
    check_dtype("gate", gate)
    check_tensor("gate", gate, gate.shape, gate.dtype, gate.device)
    check_tensor("up", up, gate.shape, gate.dtype, gate.device)
    if not runs_kernel(gate):
        if is_gelu:
            gate.copy_(gate_reference(gate, kind)).mul_(up)
        else:
            functional.silu(gate, inplace=True).mul_(up)
        return
    block = _THREADS * 16 // gate.element_size()
    activate_kernel[(-(-gate.numel() // block),)](
        gate, up, gate.numel(), block, is_gelu, num_warps=_THREADS // 32
    )


def silu_mul(gate_up: Tensor, out: Tensor, kind: str = "silu") -> None:
    """out = f(gate) * up, rounded to the dtype after each of the two.

    Args:
        gate_up: [n, 2 * m], gate ++ up.
        out: [n, m].
        kind: f, "silu" or "gelu_tanh".
    """
    is_gelu = check_gate(kind)
    check_dtype("gate_up", gate_up)
    n, size = out.shape
    check_tensor("gate_up", gate_up, (n, 2 * size), gate_up.dtype, gate_up.device)
    check_tensor("out", out, (n, size), gate_up.dtype, gate_up.device)
    if not runs_kernel(gate_up):
        return silu_mul_reference(gate_up, out, kind)
    block = _THREADS * 16 // out.element_size()  # one load of 16 bytes per thread
    silu_mul_kernel[(n, -(-size // block))](
        gate_up, out, size, block, is_gelu, num_warps=_THREADS // 32
    )


def silu_mul_reference(gate_up: Tensor, out: Tensor, kind: str = "silu") -> None:
    """`silu_mul` by torch."""
    gate, up = gate_up.chunk(2, dim=1)
    torch.mul(gate_reference(gate, kind), up, out=out)


def gate_reference(gate: Tensor, kind: str) -> Tensor:
    """The activation alone, by torch."""
    if kind == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    return functional.silu(gate)
