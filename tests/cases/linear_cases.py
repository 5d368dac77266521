"""Operands of linear layers, dense and packed."""

from __future__ import annotations

import numpy as np
import torch

KINDS = ["plain", "bias", "norm", "silu_mul", "residual"]
OUT_FEATURES = [1, 63, 64, 65, 190]  # one weight block each, so that every tile edge occurs


def random(rng: np.random.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0):
    return torch.from_numpy(scale * rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x).to(dtype).double().numpy()


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()
