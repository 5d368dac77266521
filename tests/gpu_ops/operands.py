"""Operands and expectations of the operators' tests."""

from __future__ import annotations

import numpy as np
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Of one rounding to the dtype, relative L2, with room for a few of them.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(
    rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: str, scale: float = 1.0
) -> torch.Tensor:
    """Normally distributed values, already rounded to `dtype`."""
    values = torch.from_numpy(scale * rng.standard_normal(shape, dtype=np.float32))
    return values.to(device=device, dtype=dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """An output that must be written: NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative L2 against a float64 expectation; NaN fails."""
    assert expected.dtype == torch.float64
    error = torch.linalg.vector_norm(actual.double().cpu() - expected.cpu())
    scale = torch.linalg.vector_norm(expected.cpu())
    assert error <= tolerance * scale, f"relative L2 {float(error / scale):.3g} > {tolerance:.3g}"
