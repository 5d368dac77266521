"""Experts, packed and dense, against float64: ISA x format x dtype x gate x bias x tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.linear_cases import dequantised, eight_bits, packed, random, rounded, wide
from cases.pairwise import pairwise
from cases.seeded import new_rng

from cpu_ops import native
from cpu_ops.packed import FORMAT_CODES
from cpu_ops.routed_linear import ExpertChoice, Gate, RoutedLinear, run_experts

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = native.available_isas()
GATES = {"silu": Gate("silu"), "clamped": Gate("clamped", 1.702, 0.7)}
NUM_EXPERTS, PER_TOKEN, FEW_ROWS = 5, 3, 16


def routed(rng: np.random.Generator, num_tokens: int) -> torch.Tensor:
    """Different experts of each token; of many tokens the first expert has most, and some none."""
    chosen = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :PER_TOKEN]
    chosen[: num_tokens // 2, 0] = 0
    chosen[: num_tokens // 2, 1:] = [3, NUM_EXPERTS]
    return torch.from_numpy(chosen.copy())


def activated(y: np.ndarray, gate: Gate, dtype: torch.dtype) -> np.ndarray:
    y = rounded(y, dtype)
    if gate.kind == "none":
        return y
    gates, ups = np.split(y, 2, axis=1) if gate.kind == "silu" else (y[:, ::2], y[:, 1::2])
    if gate.kind == "silu":
        return rounded(rounded(gates / (1 + np.exp(-gates)), dtype) * ups, dtype)
    gates = np.minimum(gates, gate.limit)
    ups = rounded(np.clip(ups, -gate.limit, gate.limit) + 1, dtype)
    sigmoid = rounded(1 / (1 + np.exp(-rounded(gates * gate.alpha, dtype))), dtype)
    return rounded(ups * rounded(gates * sigmoid, dtype), dtype)


def through(x, matrix, bias, experts, gate, dtype, few) -> np.ndarray:
    """float64 [num_pairs, columns] of x [num_pairs, in]; NaN of pairs without an expert."""
    size = len(matrix) // NUM_EXPERTS
    found = np.full((len(x), size if gate.kind == "none" else size // 2), np.nan)
    for expert in {*experts.tolist()} - {NUM_EXPERTS}:
        at = np.flatnonzero(experts == expert)
        rows = x[at] if len(at) > few else eight_bits(x[at])
        y = rows @ matrix[expert * size : (expert + 1) * size].T
        y = y if bias is None else y + wide(bias)[expert]
        found[at] = activated(y, gate, dtype)
    return found


@pytest.mark.parametrize(
    ("isa", "dtype", "format", "gate", "has_bias", "num_tokens", "width", "inner"),
    pairwise(
        ISAS, DTYPES, [*FORMAT_CODES, ""], list(GATES), [False, True], [1, 7, 64], [64, 576, 96],
        [32, 65, 160], together=2,
    ),
    ids=str,
)  # fmt: skip
def test_matches_reference(isa, dtype, format, gate, has_bias, num_tokens, width, inner, pool):
    rng, gate = new_rng(), GATES[gate]
    sizes = ((2 * inner, width), (90, inner))
    matrices = [
        packed(rng, format, NUM_EXPERTS * out, n)
        if format
        else random(rng, dtype, NUM_EXPERTS, out, n)
        for out, n in sizes
    ]
    biases = [random(rng, dtype, NUM_EXPERTS, out) if has_bias else None for out in (2 * inner, 90)]
    up, down = (
        RoutedLinear(matrix, dtype, NUM_EXPERTS, bias, gate=of, isa=isa)
        for matrix, bias, of in zip(matrices, biases, (gate, None), strict=True)
    )
    x, experts = random(rng, dtype, num_tokens, width), routed(rng, num_tokens)
    weights = torch.from_numpy(rng.random((num_tokens, PER_TOKEN), np.float32))
    flat = experts.numpy().ravel()
    some = flat < NUM_EXPERTS
    mats = [dequantised([x]) if format else wide(x).reshape(-1, x.shape[-1]) for x in matrices]
    few = FEW_ROWS if format else 0  # that are rounded
    hidden = through(wide(x).repeat(PER_TOKEN, 0), mats[0], biases[0], flat, gate, dtype, few)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    found = wide(up(pool, x, experts)).reshape(len(flat), -1)
    assert relative_error(found[some], hidden[some]) < tolerance
    assert not found[~some].any()
    # The second product's inputs as they were found: their roundings may lie beside a tie.
    second = through(found, mats[1], biases[1], flat, Gate(), dtype, few)
    routes = np.where(some, wide(weights).ravel(), 0)[:, None]
    wanted = (np.nan_to_num(second) * routes).reshape(num_tokens, PER_TOKEN, -1).sum(1)
    out = run_experts(pool, up, down, x, experts, weights)
    assert relative_error(wide(out), wanted) < tolerance
    assert torch.equal(out, run_experts(pool, up, down, x, experts, weights))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("num_tokens", [2, 40])
@pytest.mark.parametrize("format", ["q4", ""])
def test_nan_stays_in_its_token(isa, gate, num_tokens, format, pool):
    rng, dtype = new_rng(), torch.float32
    if format:
        matrices = packed(rng, format, 128, 64), packed(rng, "t4", 128, 32)
    else:
        matrices = random(rng, dtype, 2, 64, 64), random(rng, dtype, 2, 64, 32)
    up = RoutedLinear(matrices[0], dtype, 2, gate=GATES[gate], isa=isa)
    down = RoutedLinear(matrices[1], dtype, 2, isa=isa)
    x = random(rng, dtype, num_tokens, 64)
    x[1, 5] = float("nan")
    experts = torch.tensor([[0, 1]]).repeat(num_tokens, 1)
    out = run_experts(pool, up, down, x, experts, torch.ones(num_tokens, 2))
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normalises", "rounds"), [(True, False), (False, True)])
def test_experts_are_the_likeliest(isa, dtype, normalises, rounds):
    """In their order, of equals the first; of a token with NaN or infinity all weights are NaN."""
    logits = random(new_rng(), dtype, 9, 37) * 3
    logits[0, 5] = logits[0, 30] = 11.0
    logits[1, 3], logits[2, 4] = float("nan"), float("inf")
    logits[3, 4] = -float("inf")
    choice = ExpertChoice(4, normalises, rounds)
    experts, weights = choice(logits, isa=isa)
    assert experts[0, :2].tolist() == [5, 30]
    p = torch.softmax(logits.double(), -1)
    order = p.argsort(dim=-1, descending=True, stable=True)[:, :4]
    expected = p.gather(1, order)
    expected = expected / expected.sum(-1, keepdim=True) if normalises else expected
    for token in range(9):
        if token in (1, 2):
            assert weights[token].isnan().all()
            assert experts[token].tolist() == [0, 1, 2, 3]
        else:
            assert experts[token].tolist() == order[token].tolist()
            tolerance = torch.finfo(dtype).eps if rounds else 1e-6
            torch.testing.assert_close(
                weights[token].double(), expected[token], rtol=tolerance + 1e-6, atol=1e-7
            )
    if rounds:
        assert torch.equal(weights.to(dtype).float()[3:], weights[3:])
    with pytest.raises(ValueError, match=r"experts per token must be in 1\.\.37.* got 38"):
        ExpertChoice(38, normalises, rounds)(logits)


def test_refusals(pool):
    weight = packed(new_rng(), "q4", 12, 32)
    linear = RoutedLinear(weight, torch.float32, 2)
    with pytest.raises(ValueError, match=r"num_experts must divide the 12 rows.*got 5"):
        RoutedLinear(weight, torch.float32, 5)
    with pytest.raises(ValueError, match="unknown gate 'gelu'; available: none, silu, clamped"):
        RoutedLinear(weight, torch.float32, 2, gate=Gate("gelu"))
    with pytest.raises(ValueError, match="even number of outputs, got 3"):
        RoutedLinear(weight, torch.float32, 4, gate=Gate("silu"))
    with pytest.raises(ValueError, match="expert must be at least 0, got -1"):
        linear(pool, torch.zeros(1, 32), torch.tensor([[-1]]))
    one = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="down must take 6 features"):
        run_experts(pool, linear, linear, torch.zeros(1, 32), one, torch.zeros(1, 1))
