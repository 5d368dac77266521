"""Operands of linear layers, dense and packed."""

from __future__ import annotations

import numpy as np
import torch
from cases import kernel_references as reference

from cpu_ops.packed import FORMATS, GROUP, PackedWeight, quantise

KINDS = ["plain", "bias", "norm", "silu_mul", "residual"]
OUT_FEATURES = [1, 63, 64, 65, 190]  # one weight block each, so that every tile edge occurs


def random(rng: np.random.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0):
    return torch.from_numpy(scale * rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x).to(dtype).double().numpy()


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def prepared(x, dtype: torch.dtype, *, norm=None, silu_mul: bool = False) -> np.ndarray:
    """float64 of what meets the weights, rounded where transformers rounds."""
    x = wide(x)
    if norm is not None:
        normed = rounded(reference.rms_norm(x, np.ones(x.shape[1]), norm[1]), dtype)
        x = rounded(normed * wide(norm[0]), dtype)
    if silu_mul:
        gate, up = np.split(x, 2, axis=1)
        x = rounded(rounded(reference.silu_mul(gate, np.ones_like(gate)), dtype) * up, dtype)
    return x


def packed(rng: np.random.Generator, format: str, num_out: int, width: int) -> PackedWeight:
    """Weights of any format: of those that nothing is rounded to, codes and scales at random."""
    if format in FORMATS:
        return quantise(
            random(rng, torch.float32, num_out, width, scale=width**-0.5) + 0.01, format
        )
    shape, has_table = (num_out, -(-width // GROUP)), format.startswith("t4")
    dtype, size = (np.uint8, GROUP // 2) if has_table else (np.int8, GROUP)
    limits = np.iinfo(dtype)
    codes = rng.integers(limits.min, limits.max, (*shape, size), dtype, endpoint=True)
    if width % GROUP and not has_table:
        codes[:, -1, width % GROUP :] = 0
    sizes = (num_out, shape[1] * 2) if format.endswith("x16") else shape
    scales = (random(rng, torch.float32, *sizes) * 0.01).half()
    minimums = random(rng, torch.float16, *shape) if format == "q8m" else None
    table = rng.integers(-128, 127, 16, np.int8, endpoint=True) if has_table else None
    tensor = None if table is None else torch.from_numpy(table)
    return PackedWeight(torch.from_numpy(codes), scales, minimums, width, tensor)


def dequantised(weights: list[PackedWeight]) -> np.ndarray:
    """float64 [out, in], without the code under test."""
    rows = []
    for weight in weights:
        codes = weight.codes
        if codes.dtype == torch.uint8:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        if weight.table is not None:
            codes = torch.from_numpy(weight.table.numpy()[codes.numpy()])
        each = weight.scales.shape[1] // codes.shape[1]
        values = wide(codes) * wide(weight.scales.repeat_interleave(GROUP // each, 1)).reshape(
            codes.shape
        )
        if weight.minimums is not None:
            values += wide(weight.minimums)[..., None]
        rows.append(values.reshape(len(values), -1)[:, : weight.in_features])
    return np.concatenate(rows)


def eight_bits(x: np.ndarray) -> np.ndarray:
    """Rows on the grid of int8 that the kernels put few rows on; in float32, as ties are common."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
    padded = padded.astype(np.float32)
    largest = np.maximum(np.abs(padded).max(-1, keepdims=True), np.float32(1e-30))
    codes = np.round(padded * (np.float32(127) / largest)).astype(np.float64)
    return (codes * (largest / 127)).reshape(len(x), -1)[:, : x.shape[1]]
