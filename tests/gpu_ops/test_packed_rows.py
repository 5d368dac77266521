"""Linear layers of packed weights against float64, with every combination of what is fused."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, quiet_numpy, random
from cases.packed_rows import OF_CODES, rows_of
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.launch import runs_kernel
from gpu_ops.packed_linear import (
    GPU_FORMATS,
    GpuPackedLinear,
    PackedRows,
    quantise_rows,
    unpack,
)
from gpu_ops.packed_rows import has_tensor_cores

EPS = 1e-5


def made(rng, rows: int, num_in: int, formats: str, device: str) -> list[PackedRows]:
    """Weights in as many formats, each of a share of the rows."""
    parts, names = [], formats.split()
    for i, name in enumerate(names):
        share = rows // len(names) if i + 1 < len(names) else rows - i * (rows // len(names))
        dense = random(rng, share, num_in, dtype=torch.float32, device=device, scale=num_in**-0.5)
        parts.append(rows_of(dense, name))
    return parts


def dense_of(parts: list[PackedRows]) -> torch.Tensor:
    return torch.cat([part.dequantise().double() for part in parts])


def on_grid(x: torch.Tensor) -> torch.Tensor:
    """What the kernel multiplies: rows on 255 points per group of 32."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).flatten(1)[:, : x.shape[1]]


def minimums_of(parts: list[PackedRows]) -> torch.Tensor:
    """The least of each weight's group, 0 where there are none."""
    least = []
    for part in parts:
        _, found = part.scales_and_minimums
        least.append(torch.zeros_like(part.numbers[..., 0]) if found is None else found)
    numbers = torch.cat(least)[..., None].double().expand(-1, -1, 32)
    return numbers.flatten(1)[:, : parts[0].in_features]


def expected_of(x, parts, bias, norm, glu, residual, *, is_rounded):
    x = x.double()
    if norm is not None:
        x = norm.double() * x / (x.square().mean(1, keepdim=True) + EPS).sqrt()
    weight, least = dense_of(parts), minimums_of(parts)
    y = x @ weight.T
    if is_rounded:  # minimums meet sums of rows as they are
        y = on_grid(x) @ (weight - least).T + x @ least.T
    if bias is not None:
        y += bias.double()
    if glu:
        gate, up = y.chunk(2, dim=1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize(
    ("dtype", "formats", "num_out", "num_in", "fused"),
    combinations(
        DTYPES,
        [*GPU_FORMATS, "q4 q8", "q8 q8x16"],
        [(5, 16), (7, 576), (33, 1000), (24, 2048)],
        ["", "bias", "norm", "glu", "residual", "norm glu", "all"],
    ),
)
@pytest.mark.parametrize(
    "num_rows",
    [1, 3, pytest.param(12, marks=pytest.mark.cuda), pytest.param(23, marks=pytest.mark.cuda)],
)
def test_rows(
    device: str,
    dtype: torch.dtype,
    formats: str,
    num_out: int,
    num_in: int,
    fused: str,
    num_rows: int,
) -> None:
    rng = new_rng()
    kinds = ["bias", "norm", "glu", "residual"] if fused == "all" else fused.split()
    rows = num_out * (2 if "glu" in kinds else 1)
    x = random(rng, num_rows, num_in, dtype=dtype, device=device)
    parts = made(rng, rows, num_in, formats, device)
    bias = random(rng, rows, dtype=dtype, device=device) if "bias" in kinds else None
    norm = random(rng, num_in, dtype=dtype, device=device) if "norm" in kinds else None
    shape = num_rows, num_out
    residual = random(rng, *shape, dtype=dtype, device=device) if "residual" in kinds else None
    expected = expected_of(
        x, parts, bias, norm, "glu" in kinds, residual, is_rounded=runs_kernel(x)
    )
    out = poisoned(*shape, dtype=dtype, device=device)
    linear = GpuPackedLinear(parts, dtype, bias)
    given = None if norm is None else (norm, EPS)
    linear(x, out, norm=given, glu="glu" in kinds, residual=residual)
    # A code may be the neighbour: between two points, or where a norm is rounded otherwise.
    neighbours = OF_CODES * (1 if "norm" in kinds else 0.1)
    assert_close(out, expected, neighbours + 16 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("format", "num_rows"), combinations(GPU_FORMATS, [1, 2, 8, 9, 16, 27, 65])
)
def test_numbers_of_rows(device: str, format: str, num_rows: int) -> None:
    rng = new_rng()
    x = random(rng, num_rows, 200, dtype=torch.bfloat16, device=device)
    parts = made(rng, 70, 200, format, device)
    linear = GpuPackedLinear(parts, torch.bfloat16)
    assert (linear.out_features, linear.in_features) == (70, 200)
    is_rounded = runs_kernel(x) and num_rows <= (32 if has_tensor_cores(x.device) else 8)
    expected = expected_of(x, parts, None, None, False, None, is_rounded=is_rounded)
    assert_close(linear(x), expected, 1e-2)
    assert_close(linear.first(33)(x), expected[:, :33], 1e-2)


def test_the_first_outputs_end_in_a_part(device: str) -> None:
    rng = new_rng()
    parts = made(rng, 48, 64, "q4 q8 q4", device)
    linear = GpuPackedLinear(parts, torch.float32, torch.arange(48.0, device=device))
    x = random(rng, 2, 64, dtype=torch.float32, device=device)
    expected = x.double() @ dense_of(parts).T + torch.arange(48.0, device=device).double()
    for count in (7, 16, 20, 32, 40, 48):
        assert_close(linear.first(count)(x), expected[:, :count], 1e-2)
    assert linear.num_bytes == 16 * 2 * (34 + 2 * 20)


@pytest.mark.parametrize("format", GPU_FORMATS)
def test_weights_are_unpacked_exactly(device: str, format: str) -> None:
    (part,) = made(new_rng(), 9, 100, format, device)
    unpacked = unpack(part.part(2, 9), torch.float32)
    torch.testing.assert_close(unpacked, part.dequantise()[2:], rtol=1e-6, atol=1e-7)


def test_a_row_is_on_the_nearest_points(device: str) -> None:
    x = random(new_rng(), 2, 100, dtype=torch.float32, device=device)
    if device == "cpu" and not runs_kernel(x):
        pytest.skip("references multiply rows as they are")
    codes, scales, sums = quantise_rows(x)
    groups = torch.nn.functional.pad(x, (0, 28)).view(2, 4, 32)
    torch.testing.assert_close(scales, groups.abs().amax(-1) / 127)
    torch.testing.assert_close(sums, groups.sum(-1), rtol=1e-4, atol=1e-5)
    found = codes.view(2, 4, 32).float() * scales[..., None]
    assert (found - groups).abs().le(scales[..., None] * 0.501).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", GPU_FORMATS)
@pytest.mark.parametrize("num_rows", [1, 4])
def test_non_finite_rows_are_not_hidden(
    device: str, format: str, bad: float, num_rows: int
) -> None:
    rng = new_rng()
    parts = made(rng, 8, 96, format, device)
    x = random(rng, num_rows, 96, dtype=torch.float32, device=device)
    x[0, 40] = bad
    with quiet_numpy():
        y = GpuPackedLinear(parts, torch.float32)(x)
    assert not y[0].isfinite().any()
    assert y[1:].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 3, 33])
@pytest.mark.parametrize("format", GPU_FORMATS)
def test_a_vocabulary_of_more_outputs_than_a_grid_is_high(format: str, num_rows: int) -> None:
    rng = new_rng()
    parts = made(rng, 70_001, 32, format, "cuda")
    x = random(rng, num_rows, 32, dtype=torch.bfloat16, device="cuda")
    expected = expected_of(x, parts, None, None, False, None, is_rounded=num_rows < 33)
    assert_close(GpuPackedLinear(parts, torch.bfloat16)(x), expected, 1e-2)


def test_a_summand_in_float32(device: str) -> None:
    """Of several ranks', rounded later."""
    rng = new_rng()
    parts = made(rng, 8, 96, "q4", device)
    x = random(rng, 1, 96, dtype=torch.bfloat16, device=device)
    out = poisoned(1, 8, dtype=torch.float32, device=device)
    GpuPackedLinear(parts, torch.bfloat16)(x, out)
    assert_close(out, x.double() @ dense_of(parts).T, OF_CODES)


@pytest.mark.parametrize("format", GPU_FORMATS)
def test_rows_over_what_is_there(format: str) -> None:
    """Parts of one piece are found again; separate arrays are not."""
    rows = rows_of(torch.randn(12, 64), format).part(3, 9)
    scales, minimums = rows.scales_and_minimums
    known = PackedRows.over(format, rows.codes, scales, minimums, 64)
    assert known is not None
    assert torch.equal(known.dequantise(), rows.dequantise())
    assert known.numbers.data_ptr() == rows.numbers.data_ptr()
    if minimums is not None:
        apart = PackedRows.over(format, rows.codes, scales.clone(), minimums.clone(), 64)
        assert apart is None
