"""Packed weights as a GPU reads them."""

from __future__ import annotations

from dataclasses import replace

import torch

from cpu_ops.packed import FORMATS, PackedWeight, quantise
from gpu_ops.packed_linear import PackedRows

OF_CODES = 2e-2  # relative L2 of a row's int8 codes, of which the largest sets the grid


def rows_of(dense: torch.Tensor, format: str) -> PackedRows:
    packed = quantise(dense, format) if format in FORMATS else random_packed(dense, format)
    rows = PackedRows.of(*attributes_of(packed))
    assert torch.equal(rows.dequantise(), packed.dequantise())
    return rows


def attributes_of(packed: PackedWeight) -> tuple:
    return packed.format, packed.codes, packed.scales, packed.minimums, packed.in_features


def random_packed(dense: torch.Tensor, format: str) -> PackedWeight:
    """q8 codes with minimums, or with a scale to each half of a group."""
    q8 = quantise(dense, "q8")
    if format == "q8m":
        minimums = (q8.scales.float() * torch.randn_like(q8.scales.float()) * 40).half()
        return replace(q8, minimums=minimums)
    scales = torch.stack([q8.scales, (q8.scales.float() * 0.7).half()], -1).flatten(1)
    return replace(q8, scales=scales)
