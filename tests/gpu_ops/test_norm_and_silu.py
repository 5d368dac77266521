"""add_rms_norm and silu_mul against float64 and against the rounding of the norm and torch."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, quiet_numpy, random
from cases.seeded import new_rng
from cases.slowly import combinations
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gpu_ops.rms_norm import add_rms_norm, rms_norm
from gpu_ops.silu_mul import activate, silu_mul

EPS = 1e-5


@pytest.mark.parametrize(
    ("dtype", "n", "hidden_size", "adds"),
    combinations(DTYPES, [(1, 64), (3, 576), (2, 4096), (1, 5120)], [True, False]),
)
def test_sums_and_normalises(
    device: str, dtype: torch.dtype, n: int, hidden_size: int, adds: bool
) -> None:
    rng = new_rng()
    residual = random(rng, n, hidden_size, dtype=dtype, device=device, scale=3.0)
    delta = random(rng, n, hidden_size, dtype=dtype, device=device) if adds else None
    weight = random(rng, hidden_size, dtype=dtype, device=device)
    out = poisoned(n, hidden_size, dtype=dtype, device=device)
    total = residual if delta is None else residual + delta
    x = total.double()
    expected = weight.double() * x / (x.square().mean(1, keepdim=True) + EPS).sqrt()

    add_rms_norm(residual, delta, weight, EPS, out)
    assert torch.equal(residual, total)
    assert_close(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "size", "offset", "rounds", "kind"),
    combinations(DTYPES, [64, 576, 5376], [0, 1], [True, False], ["x's", "float32", "none"]),
)
def test_norms_of_any_rule(
    device: str, dtype: torch.dtype, size: int, offset: int, rounds: bool, kind: str
) -> None:
    rng, weight = new_rng(), None
    x = random(rng, 2, 3, size, dtype=dtype, device=device, scale=3.0)
    if kind != "none":
        weight = random(rng, size, dtype=dtype if kind == "x's" else torch.float32, device=device)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    if weight is not None:
        expected = expected * (weight.double() + offset)
    found = rms_norm(x, weight, EPS, offset=offset, rounds=rounds)
    assert_close(found, expected, TOLERANCE[dtype])
    x[0, 0, 1], x[1, 1, 0] = torch.nan, torch.inf
    with quiet_numpy():
        found = rms_norm(x, weight, EPS, offset=offset, rounds=rounds)
    is_wrong = found.isnan().any(-1)
    assert is_wrong.tolist() == [[True, False, False], [False, True, False]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_like_transformers(device: str, dtype: torch.dtype) -> None:
    rng = new_rng()
    norm = LlamaRMSNorm(576, eps=EPS).to(device=device, dtype=dtype)
    norm.weight.data = random(rng, 576, dtype=dtype, device=device)
    residual = random(rng, 4, 576, dtype=dtype, device=device)
    out = poisoned(4, 576, dtype=dtype, device=device)
    add_rms_norm(residual, None, norm.weight.data, EPS, out)
    # The sum of squares in another order may move a mean by one float32 step, rarely a result.
    assert (out != norm(residual)).float().mean() < 0.01


def test_wrong_operands() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match=r"delta must be \[2, 64\], got \[1, 64\]"):
        add_rms_norm(x, x[:1], x[0], EPS, x.clone())
    with pytest.raises(ValueError, match=r"weight must be torch.float32, got torch.float16"):
        add_rms_norm(x, None, x[0].half(), EPS, x.clone())
    with pytest.raises(ValueError, match=r"out must be contiguous, got strides \(128, 1\)"):
        add_rms_norm(x, None, x[0], EPS, torch.zeros(2, 128)[:, :64])
    with pytest.raises(ValueError, match=r"residual must have one of .*, got torch.float64"):
        add_rms_norm(x.double(), None, x[0].double(), EPS, x.double())


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


def test_silu_mul_of_wrong_operands() -> None:
    with pytest.raises(ValueError, match=r"up must be \[2, 8\], got \[2, 4\]"):
        activate(torch.zeros(2, 8), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"gate_up must be \[2, 16\], got \[2, 8\]"):
        silu_mul(torch.zeros(2, 8), torch.zeros(2, 8))
