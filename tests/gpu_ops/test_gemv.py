"""gemv against float64, with every combination of what it fuses."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.gemv import gemv

EPS = 1e-5


def expected_of(x, weight, bias, norm, glu, residual):
    x = x.double()
    if norm is not None:
        x = norm.double() * x / (x.square().mean(1, keepdim=True) + EPS).sqrt()
    y = x @ weight.double().T
    if bias is not None:
        y += bias.double()
    if glu:
        gate, up = y.chunk(2, dim=1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize(
    ("dtype", "num_out", "num_in", "fused"),
    combinations(
        DTYPES,
        [(5, 16), (7, 576), (33, 1000), (24, 2048)],
        ["", "bias", "norm", "glu", "residual", "norm glu", "all"],
    ),
)
def test_one_row(device: str, dtype: torch.dtype, num_out: int, num_in: int, fused: str) -> None:
    rng = new_rng()
    parts = ["bias", "norm", "glu", "residual"] if fused == "all" else fused.split()
    rows = num_out * (2 if "glu" in parts else 1)
    x = random(rng, 1, num_in, dtype=dtype, device=device)
    weight = random(rng, rows, num_in, dtype=dtype, device=device, scale=num_in**-0.5)
    bias = random(rng, rows, dtype=dtype, device=device) if "bias" in parts else None
    norm = random(rng, num_in, dtype=dtype, device=device) if "norm" in parts else None
    residual = random(rng, 1, num_out, dtype=dtype, device=device) if "residual" in parts else None
    expected = expected_of(x, weight, bias, norm, "glu" in parts, residual)
    out = poisoned(1, num_out, dtype=dtype, device=device)
    gemv(
        x,
        weight,
        out,
        bias=bias,
        norm=None if norm is None else (norm, EPS),
        glu="glu" in parts,
        residual=residual,
    )
    # A few outputs may be off by the roundings of all that is fused, and cancel with the residual.
    assert_close(out, expected, 16 * TOLERANCE[dtype])


def test_the_residual_may_be_the_output(device: str) -> None:
    rng = new_rng()
    x = random(rng, 1, 256, dtype=torch.float32, device=device)
    weight = random(rng, 40, 256, dtype=torch.float32, device=device)
    residual = random(rng, 1, 40, dtype=torch.float32, device=device)
    expected = expected_of(x, weight, None, None, False, residual)
    gemv(x, weight, residual, residual=residual)
    assert_close(residual, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("dtype", "has_bias"), combinations(DTYPES, [False, True]))
def test_a_summand_is_not_rounded(device: str, dtype: torch.dtype, has_bias: bool) -> None:
    rng = new_rng()
    x = random(rng, 1, 1000, dtype=dtype, device=device)
    weight = random(rng, 33, 1000, dtype=dtype, device=device, scale=1000**-0.5)
    bias = random(rng, 33, dtype=dtype, device=device) if has_bias else None
    out = poisoned(1, 33, dtype=torch.float32, device=device)
    gemv(x, weight, out, bias=bias)
    expected = expected_of(x, weight, bias, None, False, None)
    assert_close(out, expected, TOLERANCE[torch.float32])


def test_wrong_operands() -> None:
    x, weight, out = torch.zeros(1, 64), torch.zeros(8, 64), torch.zeros(1, 8)
    with pytest.raises(ValueError, match=r"x must be \[1, 64\], got \[2, 64\]"):
        gemv(torch.zeros(2, 64), weight, out)
    with pytest.raises(ValueError, match=r"weight must be \[16, 64\], got \[8, 64\]"):
        gemv(x, weight, out, glu=True)
    with pytest.raises(ValueError, match=r"bias must be \[8\], got \[1\]"):
        gemv(x, weight, out, bias=torch.zeros(1))
    with pytest.raises(ValueError, match=r"residual must be torch.float32, got torch.float16"):
        gemv(x, weight, out, residual=out.half())
    with pytest.raises(ValueError, match=r"out must be torch.float16, got torch.float32"):
        gemv(x.half(), weight.half(), out, residual=out.half())
    with pytest.raises(ValueError, match=r"norm must be \[64\], got \[8\]"):
        gemv(x, weight, out, norm=(weight[:, 0].contiguous(), EPS))
