"""silu_mul against float64 and against torch's rounding."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations
from torch.nn import functional

from gpu_ops.silu_mul import activate, silu_mul


@pytest.mark.parametrize(
    ("dtype", "n", "size"),
    combinations(DTYPES, [(1, 8), (3, 1023), (2, 1024), (1, 1025), (1, 4099)]),
)
def test_multiplies(device: str, dtype: torch.dtype, n: int, size: int) -> None:
    gate_up = random(new_rng(), n, 2 * size, dtype=dtype, device=device, scale=4.0)
    out = poisoned(n, size, dtype=dtype, device=device)
    silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(out, gate / (1 + (-gate).exp()) * up, TOLERANCE[dtype])


def test_rounds_like_torch(device: str) -> None:
    dtype = torch.bfloat16
    gate_up = random(new_rng(), 2, 2048, dtype=dtype, device=device, scale=4.0)
    out = poisoned(2, 1024, dtype=dtype, device=device)
    silu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=1)
    assert (out != functional.silu(gate) * up).float().mean() < 0.01


def test_large_gates(device: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    out = poisoned(1, 2, dtype=torch.float32, device=device)
    silu_mul(gate_up, out)
    assert out.tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize(
    ("dtype", "n", "size"), combinations(DTYPES, [(1, 8), (3, 1023), (2, 1025)])
)
def test_activates_in_place(device: str, dtype: torch.dtype, n: int, size: int) -> None:
    gate, up = random(new_rng(), 2, n, size, dtype=dtype, device=device, scale=4.0)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    activate(gate, up)
    assert_close(gate, expected, TOLERANCE[dtype])


def test_wrong_operands() -> None:
    with pytest.raises(ValueError, match=r"up must be \[2, 8\], got \[2, 4\]"):
        activate(torch.zeros(2, 8), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"gate_up must be \[2, 16\], got \[2, 8\]"):
        silu_mul(torch.zeros(2, 8), torch.zeros(2, 8))
