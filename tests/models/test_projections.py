"""A `Linear` against torch, by the CPU's kernels, by those of the GPU, and cut for ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, random
from cases.seeded import new_rng
from cases.slowly import combinations
from torch import Tensor, nn
from torch.nn import functional

from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.worker_pool import WorkerPool
from offload.models.dense_linear import DenseLinear

EPS = 1e-5
INPUTS, SIZES = 64, (48, 32, 16)
BIASES = {"none": (False, False, False), "all": (True, True, True), "some": (True, False, True)}
WIDE = torch.float64
KINDS = combinations(DTYPES, [1, 2, 5, 40], list(BIASES))
of_each_kind = pytest.mark.parametrize(("dtype", "num_rows", "biases"), KINDS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Case:
    """A projection, and what to call it with."""

    def __init__(self, dtype: torch.dtype, num_rows: int, biases: str, device: str = "cpu") -> None:
        rng = new_rng()

        def made(*shape: int, scale: float = 1.0) -> Tensor:
            return random(rng, *shape, dtype=dtype, device=device, scale=scale)

        self.modules = []
        for size, has_bias in zip(SIZES, BIASES[biases], strict=True):
            module = nn.Linear(INPUTS, size, bias=has_bias, dtype=dtype, device=device)
            module.weight.data = made(size, INPUTS, scale=INPUTS**-0.5)
            if has_bias:
                module.bias.data = made(size)
            self.modules.append(module.requires_grad_(False))
        self.linear = DenseLinear(self.modules)
        self.x, self.norm = made(num_rows, INPUTS), (made(INPUTS), EPS)
        self.gate_up = made(num_rows, 2 * INPUTS)
        self.residual, self.half_residual = (made(num_rows, sum(SIZES) // part) for part in (1, 2))

    def product(self, x: Tensor) -> Tensor:
        """In float64."""
        biases = [None if m.bias is None else m.bias.to(WIDE) for m in self.modules]
        weights = [m.weight.to(WIDE) for m in self.modules]
        return torch.cat(list(map(functional.linear, [x.to(WIDE)] * 3, weights, biases)), dim=1)

    def normed(self) -> Tensor:
        x, (weight, eps) = self.x.to(WIDE), self.norm
        return x * weight.to(WIDE) / (x.square().mean(1, keepdim=True) + eps).sqrt()


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.to(WIDE).chunk(2, dim=1)
    return functional.silu(gate) * up


def check(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, 8 * TOLERANCE[actual.dtype])  # roundings of what is fused


@of_each_kind
def test_any_rows(
    dtype: torch.dtype, num_rows: int, biases: str, device: str, pool: WorkerPool
) -> None:
    case = Case(dtype, num_rows, biases, device)
    linear, x = case.linear, case.x
    expected = case.product(x)
    check(linear(x), expected)
    check(linear(x, pool), expected)
    for part, y in zip(linear.parts, expected.split(SIZES, dim=1), strict=True):
        check(part(x, pool), y)
        assert (part.in_features, part.out_features) == (INPUTS, y.shape[1])
    if linear.prefers_cpu_ops(x):
        strided = torch.stack([x, x], dim=1)[:, 0]
        assert not strided.is_contiguous() or num_rows == 1
        assert torch.equal(linear(strided, pool), linear(x, pool))
    assert linear(x[:0], pool).shape == (0, sum(SIZES))


@of_each_kind
def test_kernels_of_a_cpu(dtype: torch.dtype, num_rows: int, biases: str, pool: WorkerPool) -> None:
    case = Case(dtype, num_rows, biases)
    kernels = case.linear.on_cpu()
    if num_rows > CpuLinear.max_rows and not kernels.takes_many_rows:
        return
    residual = case.residual
    check(kernels(pool, case.x, norm=case.norm), case.product(case.normed()))
    expected = case.product(swiglu(case.gate_up)) + residual.to(WIDE)
    check(kernels(pool, case.gate_up, residual, silu_mul=True, residual=residual), expected)


@of_each_kind
def test_kernels_of_a_gpu(dtype: torch.dtype, num_rows: int, biases: str, device: str) -> None:
    case = Case(dtype, num_rows, biases, device)
    kernels, x = case.linear.on_gpu(), case.x
    check(kernels(x), case.product(x))
    out = x.new_empty(num_rows, SIZES[0])
    assert kernels.first(SIZES[0])(x, out) is out
    check(out, case.product(x)[:, : SIZES[0]])
    check(kernels(x, norm=case.norm), case.product(case.normed()))
    gated = swiglu(case.product(case.normed()))
    for residual in (None, case.half_residual):
        expected = gated if residual is None else gated + residual.to(WIDE)
        options: dict[str, Any] = {"norm": case.norm, "glu": True, "residual": residual}
        check(kernels(x, **options), expected)
        out = torch.empty_like(case.half_residual) if residual is None else residual
        assert kernels(x, out, **options) is out
        check(out, expected)


@pytest.mark.parametrize("biases", BIASES)
def test_fused_modules_keep_working(biases: str) -> None:
    case = Case(torch.float32, 3, biases)
    before, expected = case.linear.dequantise(), case.linear(case.x)
    num_bytes = case.linear.num_bytes
    kernels = case.linear.on_gpu()
    assert torch.equal(case.linear.dequantise(), before)
    assert torch.equal(case.linear(case.x), expected)
    assert case.linear.num_bytes == num_bytes
    assert kernels.num_bytes == before.nbytes
    with torch.no_grad():
        case.modules[1].weight[2] = 7.0  # the kernels see what is written into a module
    torch.testing.assert_close(kernels(case.x), case.linear(case.x))
    again = DenseLinear(case.modules).on_gpu()
    case.modules[0].weight.zero_()
    assert torch.equal(again(case.x), kernels(case.x))


def test_what_it_says() -> None:
    linear = Case(torch.bfloat16, 1, "some").linear
    assert (linear.in_features, linear.out_features) == (INPUTS, sum(SIZES))
    assert (linear.dtype, linear.device.type) == (torch.bfloat16, "cpu")
    assert linear.num_bytes == 2 * (INPUTS * sum(SIZES) + SIZES[0] + SIZES[2])
    assert linear.dequantise().shape == (sum(SIZES), INPUTS)


def test_gradients_of_the_input() -> None:
    case = Case(torch.float32, 4, "all")
    x = case.x.requires_grad_()
    case.linear(x).sum().backward()
    torch.testing.assert_close(x.grad, case.linear.dequantise().sum(0).expand_as(x))


@pytest.mark.parametrize(("dtype", "biases"), combinations(DTYPES, list(BIASES)))
def test_ranks_have_some_rows_or_columns(dtype: torch.dtype, biases: str) -> None:
    whole = Case(dtype, 3, biases)
    num_biases = sum(n for n, has in zip(SIZES, BIASES[biases], strict=True) if has)
    outputs, summands = [], []
    for rank, columns in enumerate((range(24), range(24, INPUTS))):
        case = Case(dtype, 3, biases)
        case.linear.keep_rows(*(range(rank * n // 2, (rank + 1) * n // 2) for n in SIZES))
        assert (case.linear.in_features, case.linear.out_features) == (INPUTS, sum(SIZES) // 2)
        outputs.append(case.linear(case.x).split([n // 2 for n in SIZES], dim=1))
        case = Case(dtype, 3, biases)
        case.linear.keep_columns(columns, keeps_bias=rank == 0)
        assert (case.linear.in_features, case.linear.out_features) == (len(columns), sum(SIZES))
        num_kept = len(columns) * sum(SIZES) + (num_biases if rank == 0 else 0)
        assert case.linear.num_bytes == dtype.itemsize * num_kept
        summands.append(case.linear(case.x[:, columns.start : columns.stop]))
    expected = whole.product(whole.x)
    check(torch.cat([y for parts in zip(*outputs, strict=True) for y in parts], dim=1), expected)
    check(summands[0] + summands[1], expected)
