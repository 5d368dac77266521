"""Linear against float64 with transformers' rounding points, over ISA x dtype x shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.linear_cases import KINDS, OUT_FEATURES, prepared, random, rounded, wide
from cases.pairwise import pairwise
from cases.seeded import new_rng

from cpu_ops import native
from cpu_ops.linear import Linear, has_products
from cpu_ops.worker_pool import WorkerPool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = native.available_isas()
WIDTHS = [16, 31, 32, 48, 576, 577, 1536]
ROWS = [1, 2, 3, 4, 5, 16]
MANY_ROWS = [17, 97, 1159]  # on both sides of the kernel's tiles, tasks and pieces
# Relative L2. Kernels round where the reference rounds: only values near a tie may differ.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
EPS = 1e-5


def expected_output(x, weights, biases, dtype, *, norm=None, silu_mul=False, residual=None):
    y = prepared(x, dtype, norm=norm, silu_mul=silu_mul) @ wide(torch.cat(weights)).T
    y += np.concatenate(
        [np.zeros(len(w)) if b is None else wide(b) for w, b in zip(weights, biases, strict=True)]
    )
    y = rounded(y, dtype)
    return y if residual is None else rounded(y + wide(residual), dtype)


@pytest.mark.parametrize(
    ("isa", "dtype", "width", "kind"), pairwise(ISAS, DTYPES, WIDTHS, KINDS, together=2), ids=str
)
def test_matches_reference(isa, dtype, width, kind, pool):
    rng = new_rng()
    weights = [random(rng, dtype, n, width, scale=width**-0.5) for n in OUT_FEATURES]
    biases = [
        random(rng, dtype, n) if kind == "bias" and i != 1 else None
        for i, n in enumerate(OUT_FEATURES)
    ]
    linear = Linear(weights, biases, isa=isa)
    norm = (random(rng, dtype, width), EPS) if kind == "norm" else None
    for num_rows in ROWS + (MANY_ROWS if linear.takes_many_rows else []):
        x = random(rng, dtype, num_rows, width * (2 if kind == "silu_mul" else 1), scale=3.0)
        residual = None
        if kind == "residual":
            residual = random(rng, dtype, num_rows, linear.out_features)
        expected = expected_output(
            x, weights, biases, dtype, norm=norm, silu_mul=kind == "silu_mul", residual=residual
        )
        out = torch.full((num_rows, linear.out_features), float("nan"), dtype=dtype)
        given = x.clone()
        returned = linear(pool, x, out, norm=norm, silu_mul=kind == "silu_mul", residual=residual)
        assert returned is out
        assert torch.equal(x, given)
        assert relative_error(wide(out), expected) < TOLERANCE[dtype], num_rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_the_residual(isa, dtype, pool):
    """The decoder adds to its residual stream in place, also under SwiGLU."""
    rng = new_rng()
    weight = random(rng, dtype, 96, 160, scale=0.1)
    linear = Linear([weight], isa=isa)
    x, residual = random(rng, dtype, 3, 320), random(rng, dtype, 3, 96)
    apart = linear(pool, x, silu_mul=True, residual=residual)
    assert linear(pool, x, out=residual, silu_mul=True, residual=residual) is residual
    assert torch.equal(residual, apart)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_neighbours(isa, dtype, pool):
    """A row alone and the same row in a batch agree to rounding; threads change nothing at all."""
    rng = new_rng()
    linear = Linear([random(rng, dtype, 200, 577, scale=0.05)], isa=isa)
    x = random(rng, dtype, 7, 577)
    together = linear(pool, x)
    with_more_threads = WorkerPool(5)
    assert torch.equal(linear(with_more_threads, x), together)
    with_more_threads.close()
    for row in range(7):
        alone = linear(pool, x[row : row + 1])
        assert relative_error(wide(alone), wide(together[row : row + 1])) < TOLERANCE[dtype]


MANY = [
    (isa, dtype)
    for isa in ISAS
    for dtype in DTYPES
    if Linear([torch.zeros(1, 16, dtype=dtype)], isa=isa).takes_many_rows
]


@pytest.mark.parametrize(("isa", "dtype"), MANY, ids=str)
def test_many_rows_do_not_depend_on_their_neighbours(isa, dtype, pool):
    """To the bit: not on the threads, on how many rows there are, or on what is in the others."""
    rng = new_rng()
    linear = Linear([random(rng, dtype, 200, 577, scale=0.05)], isa=isa)
    x = random(rng, dtype, 700, 577)
    together = linear(pool, x)
    with_more_threads = WorkerPool(5)
    assert torch.equal(linear(with_more_threads, x), together)
    with_more_threads.close()
    assert torch.equal(linear(pool, x[100:150].clone()), together[100:150])
    x[3, 5], x[4, 7] = torch.inf, torch.nan
    spoilt = linear(pool, x)
    assert spoilt[4].isnan().all()
    assert not spoilt[3].isfinite().any()
    others = torch.arange(700).sub(3.5).abs() > 1
    assert torch.equal(spoilt[others], together[others])


@pytest.mark.parametrize("isa", ISAS)
def test_torch_multiplies_where_it_is_as_fast(isa):
    """bfloat16 is torch's where it has instructions for it, and float16 is no slower then."""
    has_bf16 = ISAS.index(isa) >= ISAS.index("avx512_bf16") if "avx512_bf16" in ISAS else False
    is_vector = isa not in ("scalar", "neon")
    assert has_products(torch.bfloat16, isa=isa) == (is_vector and not has_bf16)
    assert has_products(torch.float16, isa=isa) == is_vector


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_of_transformers_agree(isa, dtype, pool):
    """norm -> projection and gate/up -> down of a stock llama layer."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(hidden_size=96, intermediate_size=200)).to(dtype)
    norm = LlamaRMSNorm(96, eps=EPS).to(dtype)
    x = torch.randn(4, 96).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * torch.randn(96))
        expected = x + mlp(norm(x))
        gate_up = Linear([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()], isa=isa)
        down = Linear([mlp.down_proj.weight.detach()], isa=isa)
        hidden = gate_up(pool, x, norm=(norm.weight.detach(), EPS))
        actual = down(pool, hidden, silu_mul=True, residual=x)
    assert relative_error(wide(actual), wide(expected)) < TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_of_large_values(isa, dtype, pool):
    """The gate saturates: no overflow, no NaN, at every lane and in the tail."""
    gate = torch.tensor(
        [-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4] * 5 + [-90.0], dtype=dtype
    )
    x = torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0)
    linear = Linear([torch.eye(len(gate), dtype=dtype)], isa=isa)
    expected = torch.nn.functional.silu(gate.double()).numpy()
    np.testing.assert_allclose(
        wide(linear(pool, x, silu_mul=True))[0], expected, rtol=1e-2, atol=1e-7
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_of_any_values(isa, dtype, pool):
    """At every lane and in the tail; what is not finite is as torch's."""
    rng, width = new_rng(), 41
    gate = random(rng, dtype, 12, width, scale=3.0)
    gate[0, :8] = torch.tensor([-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4])
    largest = torch.finfo(dtype).max
    for row, value in enumerate([torch.inf, -torch.inf, torch.nan, largest, -largest], 1):
        gate[row, 5 * row], gate[row + 5, 40] = value, value
    up = random(rng, dtype, 12, width).clamp(-1, 1)
    linear = Linear([torch.eye(width, dtype=dtype)], isa=isa)
    gelu = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    expected = gelu.to(dtype).double() * up.double() @ torch.eye(width).double()
    found = wide(linear(pool, torch.cat([gate, up], dim=1), gelu_mul=True))
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-2, atol=2e-6)


def test_bad_input_is_refused(pool):
    weight = torch.zeros(6, 32)
    linear = Linear([weight])
    x = torch.zeros(2, 32)
    for arguments, message in (
        ({"weights": []}, "weights must not be empty"),
        ({"weights": [weight], "biases": [None, None]}, "expected 1 biases, got 2"),
        ({"weights": [weight.double()]}, "dtype must be one of torch.float32"),
        ({"weights": [weight, weight.half()]}, r"weights\[1\] must be torch.float32"),
        ({"weights": [weight, torch.zeros(6, 16)]}, r"weights\[1\] must be .* \[6, 32\]"),
        ({"weights": [torch.zeros(32, 6).T]}, r"weights\[0\] must be .* contiguous"),
        ({"weights": [weight], "biases": [torch.zeros(5)]}, r"biases\[0\] must be .* \[6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Linear(**arguments)
    with pytest.raises(ValueError, match="x must have 1 to 16 rows, got 17"):
        Linear([weight], isa="scalar")(pool, torch.zeros(17, 32))
    most = "1 row or more" if linear.takes_many_rows else "1 to 16 rows"
    with pytest.raises(ValueError, match=f"x must have {most}, got 0"):
        linear(pool, torch.zeros(0, 32))
    with pytest.raises(ValueError, match=r"x must be .* \[2, 64\] .* got torch.float32 \[2, 32\]"):
        linear(pool, x, silu_mul=True)
    with pytest.raises(ValueError, match=r"x must be torch\.float32 .* got torch\.float16"):
        linear(pool, x.half())
    with pytest.raises(ValueError, match=r"x must be .* contiguous"):
        linear(pool, torch.zeros(2, 64)[:, ::2])
    with pytest.raises(ValueError, match="norm and silu_mul exclude each other"):
        linear(pool, torch.zeros(2, 64), norm=(torch.ones(32), EPS), silu_mul=True)
    with pytest.raises(ValueError, match=r"norm weight must be torch.float32 \[32\]"):
        linear(pool, x, norm=(torch.ones(31), EPS))
    with pytest.raises(ValueError, match=r"out must be .* \[2, 6\] .* got torch.float32 \[3, 6\]"):
        linear(pool, x, torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"residual must be .* \[2, 6\] .* \[2, 7\]"):
        linear(pool, x, residual=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="unknown ISA 'avx9'"):
        Linear([weight], isa="avx9")(pool, x)
