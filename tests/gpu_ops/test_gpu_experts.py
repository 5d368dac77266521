"""Experts of a step's rows against float64."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, quiet_numpy, random
from cases.packed_rows import OF_CODES, rows_of
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.linear import GpuLinear
from gpu_ops.packed_linear import GPU_FORMATS, PackedRows
from gpu_ops.routed_linear import (
    GpuExperts,
    GpuRoutedMlp,
    run_experts,
    run_experts_reference,
    split_experts,
)
from gpu_ops.silu_mul import gate_reference

EPS = 1e-5


def experts_of(rng, num_experts, rows, num_in, format, dtype, device):
    """Their matrices, and these in float64."""
    dense = random(rng, num_experts * rows, num_in, dtype=dtype, device=device, scale=num_in**-0.5)
    if format == "dense":
        dense = dense.view(num_experts, rows, num_in)
        return GpuExperts(dense, num_experts), dense.double()
    packed = rows_of(dense.float(), format)
    return GpuExperts(packed, num_experts), packed.dequantise().double().view(-1, rows, num_in)


class Case:
    def __init__(
        self, device, dtype, format, num_experts, per_token, sizes, *, gate="silu", **options
    ):
        rng, (hidden, inner) = new_rng(), sizes
        router = random(rng, num_experts, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
        self.router = router.double()
        what = (format, dtype, device)
        halves, clamps = 1 if gate == "relu2" else 2, gate == "clamped"
        up, self.up = experts_of(rng, num_experts, halves * inner, hidden, *what)
        down, self.down = experts_of(rng, num_experts, hidden, inner, *what)
        if clamps:
            for experts in (up, down):
                experts.bias = random(
                    rng, num_experts, experts.out_features, dtype=dtype, device=device
                )
            up.clamp = (1.7, 0.8)
        else:
            up.kind = gate
        self.gate = gate
        self.biases = [x.bias if x.bias is None else x.bias.double() for x in (up, down)]
        self.mlp = GpuRoutedMlp(GpuLinear(router), up, down, per_token, **options)
        self.x = random(rng, 3, hidden, dtype=dtype, device=device)
        self.norm = random(rng, hidden, dtype=dtype, device=device)

    def normed(self):
        x = self.x.double()
        return self.norm.double() * x / (x.square().mean(1, keepdim=True) + EPS).sqrt()

    def expected(self, x, experts, weights):
        total = torch.zeros_like(x)
        for row, (chosen, shares) in enumerate(
            zip(experts.tolist(), weights.tolist(), strict=True)
        ):
            for expert, share in zip(chosen, shares, strict=True):
                y = self.up[expert] @ x[row]
                if self.gate == "relu2":
                    found = self.down[expert] @ y.relu().square()
                elif self.gate != "clamped":
                    gate, up = y.chunk(2)
                    found = self.down[expert] @ (gate_reference(gate, self.gate) * up)
                else:
                    alpha, limit = 1.7, 0.8
                    y = y + self.biases[0][expert]
                    gate, up = y[::2].clamp(max=limit), y[1::2].clamp(-limit, limit)
                    found = self.down[expert] @ ((up + 1) * gate * (alpha * gate).sigmoid())
                    found += self.biases[1][expert]
                total[row] += share * found
        return total


@pytest.mark.parametrize(
    ("dtype", "format", "hidden", "inner", "n", "has_norm", "gate"),
    [
        *combinations(
            DTYPES,
            ["dense", *GPU_FORMATS],
            [(32, 40), (48, 24)],
            [1, 2],
            [False, True],
            ["silu", "clamped"],
        ),
        *combinations(DTYPES, ["dense"], [(48, 24)], [2], [False], ["gelu_tanh", "relu2"]),
    ],
)
def test_experts_of_rows(device, dtype, format, hidden, inner, n, has_norm, gate):
    case = Case(
        device, dtype, format, 5, 2, (hidden, inner), gate=gate, normalises=True, rounds=False
    )
    x, norm = case.x[:n].contiguous(), (case.norm, EPS) if has_norm else None
    seen = (case.normed() if has_norm else case.x.double())[:n]
    experts, weights = case.mlp.choose(case.mlp.router(x, norm=norm))
    expected = case.expected(seen, experts, weights)
    tolerance = 16 * TOLERANCE[dtype] + (0 if format == "dense" else 3 * OF_CODES)
    out = poisoned(*x.shape, dtype=dtype, device=device)
    assert_close(case.mlp(x, out, norm=norm), expected, tolerance)
    into = torch.full_like(x, 0.5)
    case.mlp(x, into, norm=norm, residual=into)
    assert_close(into.double() - out.double(), torch.full_like(expected, 0.5), tolerance)


@pytest.mark.parametrize("format", ["dense", "q4"])
def test_of_many_rows(format):
    """The sum of a prompt's tokens, by torch."""
    case = Case("cpu", torch.float32, format, 5, 2, (64, 40), normalises=True, rounds=False)
    experts, weights = case.mlp.choose(case.mlp.router(case.x))
    expected = case.expected(case.x.double(), experts, weights)
    found = run_experts_reference(case.mlp.up, case.mlp.down, case.x, experts, weights)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "num_experts", "per_token", "normalises", "rounds"),
    combinations(DTYPES, [5, 128], [1, 2, 5], [False, True], [False, True]),
)
def test_choice(device, dtype, num_experts, per_token, normalises, rounds):
    case = Case(
        device,
        dtype,
        "dense",
        num_experts,
        per_token,
        (16, 16),
        normalises=normalises,
        rounds=rounds,
    )
    logits = random(new_rng(), 4, num_experts, dtype=dtype, device=device)
    logits[1] = 0  # of equals the first
    logits[2, -1] = logits[2].max() + 90  # others have next to no probability
    experts, weights = case.mlp.choose(logits)
    wanted = logits.double().cpu().softmax(-1).sort(dim=-1, descending=True, stable=True)
    expected = wanted.values[:, :per_token]
    if normalises:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(experts.cpu().long()[:2], wanted.indices[:2, :per_token])
    assert experts[2, 0] == num_experts - 1
    assert all(len({*row}) == per_token for row in experts.tolist())
    assert_close(weights, expected, TOLERANCE[dtype] if rounds else 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", ["dense", "q4"])
def test_non_finite(device, format, bad):
    """What is not finite is seen in its row, and in no other; experts stay in range."""
    case = Case(device, torch.float32, format, 5, 2, (32, 24), normalises=True, rounds=True)
    with quiet_numpy():
        clean = case.mlp(case.x)
        case.x[1, 7] = bad
        experts, weights = case.mlp.choose(case.mlp.router(case.x))
        out = case.mlp(case.x)
    assert ((experts >= 0) & (experts < 5)).all()
    assert weights[1].isnan().all()
    assert out[1].isnan().all()
    assert_close(out[::2], clean[::2].double(), 1e-5)


def test_wrong_operands():
    case = Case("cpu", torch.float32, "dense", 5, 2, (64, 48), normalises=True, rounds=False)
    with pytest.raises(ValueError, match=r"weights must be \[3, 2\], got \[3, 1\]"):
        run_experts(case.mlp.up, case.mlp.down, case.x, torch.zeros(3, 2).long(), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"residual must be \[3, 64\], got \[1, 64\]"):
        case.mlp(case.x, residual=case.x[:1])
    assert torch.equal(
        run_experts(case.mlp.up, case.mlp.down, case.x, torch.full((3, 2), 5), torch.ones(3, 2)),
        torch.zeros_like(case.x),
    )  # no expert
    assert case.mlp.num_bytes == case.mlp.router.num_bytes + 2 * 3 * 48 * 64 * 4
    assert isinstance(rows_of(torch.ones(4, 32), "q8"), PackedRows)


@pytest.mark.parametrize(("format", "gate"), [("dense", "clamped"), ("q4", "silu")])
def test_experts_in_slots(device, format, gate):
    """What has a slot and what has none are together what all are; rows in use are counted."""
    options = {"gate": gate, "normalises": True, "rounds": False}
    case = Case(device, torch.float32, format, 5, 2, (32, 24), **options)
    up, down = case.mlp.up, case.mlp.down
    slots_up, slots_down = (x.first(2, x.device) for x in (up, down))
    for slots, whole in ((slots_up, up), (slots_down, down)):
        slots.put(1, whole, 3)
        assert slots.num_bytes == whole.num_bytes * 2 // 5
    slot_of = torch.tensor([0, -1, -1, 1, -1], dtype=torch.int32, device=device)
    experts = torch.tensor([[0, 3], [2, 3], [4, 1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.4, 0.6]], device=device)
    positions = torch.tensor([7, 0, -1], device=device)
    use = torch.ones(5, device=device)
    host_experts = torch.full((3, 2), -9, dtype=torch.int64, device=device)
    host_weights = poisoned(3, 2, dtype=torch.float32, device=device)
    slots = split_experts(experts, weights, slot_of, positions, use, host_experts, host_weights)
    assert slots.tolist() == [[0, 1], [5, 1], [5, 5]]
    assert host_experts.tolist() == [[5, 5], [2, 5], [4, 1]]
    assert torch.equal(host_weights, weights)
    assert use.tolist() == [2, 1, 2, 3, 1]
    expected = run_experts(up, down, case.x, experts, weights)
    found = run_experts(slots_up, slots_down, case.x, slots, weights)
    found += run_experts(up, down, case.x, host_experts, weights)
    assert_close(found, expected.double(), 1e-4)
