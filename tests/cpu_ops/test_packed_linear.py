"""Packed weights against float64, over ISA x format x dtype x shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.linear_cases import (
    KINDS,
    OUT_FEATURES,
    dequantised,
    eight_bits,
    packed,
    prepared,
    random,
    rounded,
    wide,
)
from cases.pairwise import pairwise
from cases.seeded import new_rng

from cpu_ops import native
from cpu_ops.linear import PackedLinear
from cpu_ops.packed import FORMAT_CODES, FORMATS, GROUP, PackedWeight, quantise
from cpu_ops.worker_pool import WorkerPool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = native.available_isas()
# On both sides of a group, of two, and of the 16 whose scales are converted together.
WIDTHS = [16, 31, 32, 33, 64, 96, 511, 512, 513, 576, 1536, 2080]
MIXED = ["q8x16", "q4", "q8m", "t4", "t4x16"]
ROWS = [1, 2, 3, 4, 5, 7, 8, 16]
MANY_ROWS = [17, 97]
# Relative L2 against the same whole numbers in float64: only roundings to the dtype differ.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
EPS = 1e-5


def made(rng, width: int, formats: list[str]) -> list[PackedWeight]:
    return [packed(rng, format, n, width) for n, format in zip(OUT_FEATURES, formats, strict=True)]


@pytest.mark.parametrize(
    ("isa", "dtype", "width", "kind", "format"),
    pairwise(ISAS, DTYPES, WIDTHS, KINDS, [*FORMAT_CODES, "all"], together=2),
    ids=str,
)
def test_matches_reference(isa, dtype, width, kind, format, pool):
    rng = new_rng()
    formats = MIXED if format == "all" else [format] * len(OUT_FEATURES)
    weights = made(rng, width, formats)
    biases = [
        random(rng, dtype, n) if kind == "bias" and i != 1 else None
        for i, n in enumerate(OUT_FEATURES)
    ]
    linear = PackedLinear(weights, dtype, biases, isa=isa)
    matrix = dequantised(weights)
    added = np.concatenate(
        [np.zeros(n) if b is None else wide(b) for n, b in zip(OUT_FEATURES, biases, strict=True)]
    )
    norm = (random(rng, dtype, width), EPS) if kind == "norm" else None
    for num_rows in ROWS + (MANY_ROWS if linear.takes_many_rows else []):
        x = random(rng, dtype, num_rows, width * (2 if kind == "silu_mul" else 1), scale=3.0)
        residual = None
        if kind == "residual":
            residual = random(rng, dtype, num_rows, linear.out_features)
        exact = prepared(x, dtype, norm=norm, silu_mul=kind == "silu_mul")
        few = num_rows <= linear.max_rows
        y = (eight_bits(exact) if few else exact) @ matrix.T + added
        out = torch.full((num_rows, linear.out_features), float("nan"), dtype=dtype)
        given = x.clone()
        returned = linear(pool, x, out, norm=norm, silu_mul=kind == "silu_mul", residual=residual)
        assert returned is out
        assert torch.equal(x, given)
        # Norms and gates differ in the last bit, and may lie on the other side of a tie.
        turns = few and kind in ("norm", "silu_mul")
        tolerance = max(TOLERANCE[dtype], 2e-3 if turns else 0.0)
        expected = rounded(y, dtype)
        without = exact @ matrix.T + added
        if residual is not None:
            expected, without = expected + wide(residual), without + wide(residual)
        assert relative_error(wide(out), expected) < tolerance, num_rows
        # Of numbers with long tails, as products of two are, and random codes, 8 bits keep less.
        limit = 0.015 if kind == "silu_mul" or format not in FORMATS else 0.01
        assert relative_error(wide(out), without) < limit, num_rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMAT_CODES)
def test_whole_numbers_are_exact(isa, format, pool):
    """Inputs that are on the grid, with codes at its ends: float32 has no error then."""
    rng = new_rng()
    width, out_features = 3 * GROUP, 66
    shape = (out_features, 3)
    if format == "q8":
        codes = torch.from_numpy(rng.integers(-128, 128, (*shape, GROUP), dtype=np.int8))
        weight = PackedWeight(codes, random(rng, torch.float16, *shape), None, width)
    elif format == "q4":
        codes = torch.from_numpy(rng.integers(0, 256, (*shape, GROUP // 2), dtype=np.uint8))
        scales, minimums = (random(rng, torch.float16, *shape) for _ in range(2))
        weight = PackedWeight(codes, scales, minimums, width)
    else:
        weight = packed(rng, format, out_features, width)
    if weight.table is not None:
        weight.table[0], weight.table[15] = -128, 127
    ends = (-128, 127, 0) if weight.codes.dtype == torch.int8 else (0, 255)
    for row, code in enumerate(ends):
        weight.codes[row] = code
    x = torch.from_numpy(rng.integers(-127, 128, (5, width)).astype(np.float32))
    x[:, ::GROUP] = 127.0
    x[1], x[2] = 127.0, -127.0
    out = PackedLinear([weight], torch.float32, isa=isa)(pool, x)
    assert relative_error(wide(out), wide(x) @ dequantised([weight]).T) < 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMAT_CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so(isa, format, dtype, pool):
    rng = new_rng()
    weight = packed(rng, format, 70, 300)
    linear = PackedLinear([weight], dtype, isa=isa)
    x = random(rng, dtype, 6, 300)
    clean = linear(pool, x)
    x[1, 5], x[2, 299], x[3, 40] = torch.nan, torch.inf, -torch.inf
    x[4] = 0.0
    y = linear(pool, x)
    assert not y[1:4].isfinite().any()
    assert (y[4] == 0).all()
    assert torch.equal(y[[0, 5]], clean[[0, 5]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMAT_CODES)
def test_rows_do_not_depend_on_their_neighbours(isa, format, pool):
    """Threads change nothing at all, and the rows beside one change no more than rounding."""
    rng = new_rng()
    weight = packed(rng, format, 200, 577)
    linear = PackedLinear([weight], torch.float32, isa=isa)
    x = random(rng, torch.float32, 7, 577)
    together = linear(pool, x)
    with_more_threads = WorkerPool(5)
    assert torch.equal(linear(with_more_threads, x), together)
    with_more_threads.close()
    for row in range(7):
        alone = linear(pool, x[row : row + 1])
        assert relative_error(wide(alone), wide(together[row : row + 1])) < 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_the_residual(isa, dtype, pool):
    rng = new_rng()
    weight = quantise(random(rng, torch.float32, 96, 160, scale=0.1), "q4")
    linear = PackedLinear([weight], dtype, isa=isa)
    x, residual = random(rng, dtype, 3, 320), random(rng, dtype, 3, 96)
    apart = linear(pool, x, silu_mul=True, residual=residual)
    assert linear(pool, x, out=residual, silu_mul=True, residual=residual) is residual
    assert torch.equal(residual, apart)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [31, 96, 577])
@pytest.mark.parametrize("formats", [["q8", "q4", "q8", "q4", "q4"], MIXED], ids=["two", "mixed"])
def test_unpack(isa, dtype, width, formats, pool):
    weights = made(new_rng(), width, formats)
    linear = PackedLinear(weights, dtype, isa=isa)
    expected = dequantised(weights)
    for first, n in ((0, 383), (0, 1), (1, 64), (60, 100), (382, 1), (7, 0)):
        out = torch.full((n, width), float("nan"), dtype=dtype)
        linear.unpack(pool, out, first)
        assert n == 0 or relative_error(wide(out), expected[first : first + n]) < TOLERANCE[dtype]
    whole = torch.cat([weight.dequantise() for weight in weights])
    assert relative_error(wide(whole), expected) < 1e-6
    part = weights[4].dequantise(dtype, 3, 9)
    assert relative_error(wide(part), expected[196:202]) < TOLERANCE[dtype]
    with pytest.raises(ValueError, match="rows 380 to 384 are not among the 383"):
        linear.unpack(pool, torch.empty(4, width, dtype=dtype), 380)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 50, 577])
def test_quantise_takes_the_nearest(dtype, width):
    weight = random(new_rng(), dtype, 40, width) + 0.5
    for format, steps in (("q8", 254), ("q4", 15)):
        packed = quantise(weight, format)
        padded = np.pad(wide(weight), ((0, 0), (0, -width % GROUP)), mode="edge")
        groups = padded.reshape(40, -1, GROUP)
        extent = 2 * np.abs(groups).max(-1) if format == "q8" else np.ptp(groups, axis=-1)
        step = np.repeat(extent / steps, GROUP, axis=1)[:, :width]
        difference = np.abs(wide(packed.dequantise()) - wide(weight))
        assert (difference <= 0.52 * step + 2e-3 * np.abs(wide(weight))).all()
        assert quantise(packed.dequantise(), format).codes.equal(packed.codes)
    with pytest.raises(ValueError, match="unknown format 'q3'; available: q8, q4"):
        quantise(weight, "q3")
    with pytest.raises(ValueError, match="must be a matrix"):
        quantise(weight[0], "q4")


def test_groups_that_cannot_be_numbers_give_none(pool):
    weight = torch.zeros(3, 64)
    weight[0, 3], weight[1, 40] = torch.nan, torch.inf
    for format in FORMATS:
        y = PackedLinear([quantise(weight, format)], torch.float32)(pool, torch.ones(1, 64))
        assert not y[0, :2].isfinite().any()
        assert y[0, 2] == 0


def test_refusals(pool):
    weight = quantise(torch.zeros(4, 64), "q4")
    other = quantise(torch.zeros(4, 32), "q4")
    with pytest.raises(ValueError, match="weights must not be empty"):
        PackedLinear([], torch.float32)
    with pytest.raises(ValueError, match="expected 1 biases, got 2"):
        PackedLinear([weight], torch.float32, [None, None])
    with pytest.raises(ValueError, match=r"weights\[1\] must have 64 inputs, got 32"):
        PackedLinear([weight, other], torch.float32)
    with pytest.raises(ValueError, match=r"weights\[0\].codes"):
        PackedLinear(
            [PackedWeight(weight.codes[:, :1], weight.scales, weight.minimums, 64)], torch.float32
        )
    with pytest.raises(ValueError, match=r"weights\[0\].scales"):
        PackedLinear(
            [PackedWeight(weight.codes, weight.scales.float(), weight.minimums, 64)], torch.float32
        )
    linear = PackedLinear([weight], torch.float32)
    with pytest.raises(ValueError, match="x must be"):
        linear(pool, torch.zeros(1, 32))
