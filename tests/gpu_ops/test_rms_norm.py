"""add_rms_norm against float64 and against the stock norm's rounding."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gpu_ops.rms_norm import add_rms_norm

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
