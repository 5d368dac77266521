"""Steps of the gated delta rule, and gates of attention, against float64 and torch."""

from __future__ import annotations

import pytest
import torch
from cases.delta_cases import TOLERANCE, expected, made, ordered
from cases.operands import DTYPES, assert_close, poisoned, quiet_numpy, random
from cases.seeded import new_rng

from cpu_ops.delta_rule import DeltaHeads
from gpu_ops.delta_rule import GpuDeltaRule
from gpu_ops.gate_heads import gate_heads, split_gates

EPS = 1e-5
# (heads, width of the convolution, rows, by key head)
CASES = [
    (DeltaHeads(1, 1, 16, 16), 4, 1, False),
    (DeltaHeads(2, 4, 128, 128), 4, 3, True),
    (DeltaHeads(2, 6, 24, 40), 4, 2, False),
    (DeltaHeads(3, 3, 20, 83), 2, 2, False),
    (DeltaHeads(2, 6, 7, 9), 3, 5, True),
    (DeltaHeads(2, 2, 8, 16), 1, 3, True),
]


class Sequences:
    """The states of rows, each where it happens to be, and a kernel's rule."""

    def __init__(self, device: str, dtype: torch.dtype, case: tuple) -> None:
        self.heads, width, n, self.by_key_head = case
        self.rule, inputs = made(self.heads, width, n, dtype)
        self.rows = inputs["rows"]
        self.conv_states = [x.to(device) for x in inputs["conv_state"]]
        self.states = [x.to(device) for x in inputs["state"]]
        conv, norm, *gates = (x.to(device) for x in self.rule.values())
        self.kernel = GpuDeltaRule(
            self.heads, conv, (norm, EPS), *gates, by_key_head=self.by_key_head
        )
        addresses = [[x.data_ptr() for x in xs] for xs in (self.conv_states, self.states)]
        self.pointers = torch.tensor(addresses, device=device)

    def held(self) -> dict[str, torch.Tensor]:
        """The states of all rows, copied."""
        return {
            "conv_state": torch.stack(self.conv_states).cpu(),
            "state": torch.stack(self.states).cpu(),
        }

    def apart(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the kernel finds them."""
        rows = ordered(self.heads, rows, by_key_head=self.by_key_head).to(self.pointers.device)
        return torch.cat([rows, rows], 1)[:, : rows.shape[1]]

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        shape = len(rows), self.heads.num_v_heads * self.heads.v_dim
        out = poisoned(*shape, dtype=rows.dtype, device=str(self.pointers.device))
        return self.kernel(self.apart(rows), self.pointers, out).cpu()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_steps_are_the_reference(device: str, dtype: torch.dtype, case: tuple) -> None:
    sequences = Sequences(device, dtype, case)
    rows = sequences.rows
    rows[0, -1] = 30.0  # where softplus is its argument
    for _ in range(3):
        before = sequences.held()
        out, after = sequences.step(rows), sequences.held()
        of_reference = expected(sequences.heads, sequences.rule, rows, **before)
        assert torch.equal(after["conv_state"].double(), of_reference[1])
        for x, reference in ((out, of_reference[0]), (after["state"], of_reference[2])):
            assert_close(x, reference, TOLERANCE[dtype])
        rows = rows.roll(1, 1)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_rows_are_alone(device: str, case: tuple) -> None:
    """A number that is none stays in its row and head; a row without states is zeros."""
    good = Sequences(device, torch.bfloat16, case).step(Sequences("cpu", torch.bfloat16, case).rows)
    v_dim = case[0].v_dim
    for bad in (float("nan"), float("inf")):
        sequences = Sequences(device, torch.bfloat16, case)
        sequences.states[0][0, 0, 0] = bad
        sequences.pointers[:, 1] = 0
        before = sequences.held()
        with quiet_numpy():
            out = sequences.step(sequences.rows)
        assert not out[0, 0].isfinite()
        assert torch.equal(out[0, v_dim:], good[0, v_dim:])
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        assert torch.equal(out[2:], good[2:])
        for name, x in sequences.held().items():
            assert torch.equal(x[1], before[name][1])

    sequences = Sequences(device, torch.bfloat16, case)
    sequences.rows[0] = float("nan")
    with quiet_numpy():
        out = sequences.step(sequences.rows)
    assert out[0].isnan().all()
    assert torch.equal(out[1:], good[1:])


@pytest.mark.cuda
def test_a_graph_takes_states_from_where_they_are() -> None:
    sequences, others = (Sequences("cuda", torch.bfloat16, CASES[1]) for _ in range(2))
    expected_out = [others.step(others.rows) for _ in range(3)]
    rows = sequences.apart(sequences.rows)
    assert torch.equal(sequences.kernel(rows, sequences.pointers).cpu(), expected_out[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sequences.kernel(rows, sequences.pointers)
    graph.replay()
    assert torch.equal(out.cpu(), expected_out[1])
    pointers = sequences.pointers.clone()
    sequences.pointers.zero_()
    graph.replay()
    assert not out.any()
    sequences.pointers.copy_(pointers)
    graph.replay()
    assert torch.equal(out.cpu(), expected_out[2])


def test_refuses_what_does_not_fit() -> None:
    heads = DeltaHeads(2, 4, 16, 16)
    rule, inputs = made(heads, 4, 1, torch.float32)
    conv, norm, gates = rule["conv"], (rule["norm"], EPS), (rule["a_log"], rule["dt_bias"])
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of num_k_heads=2, got 3"):
        GpuDeltaRule(DeltaHeads(2, 3, 16, 16), conv, norm, *gates)
    with pytest.raises(ValueError, match="conv must be"):
        GpuDeltaRule(heads, conv[1:], norm, *gates)
    kernel, pointers = GpuDeltaRule(heads, conv, norm, *gates), torch.zeros(2, 1).long()
    with pytest.raises(ValueError, match=r"a row of projected must be torch\.float32"):
        kernel(inputs["rows"].half(), pointers)
    with pytest.raises(ValueError, match=r"pointers must be \[2, 1\], got \[1, 1\]"):
        kernel(inputs["rows"], pointers[:1])
    with pytest.raises(ValueError, match="at least 64 elements, got 48"):
        split_gates(torch.zeros(1, 48), 2, 16)
    with pytest.raises(ValueError, match=r"gates must be \[1, 48\], got \[1, 8\]"):
        gate_heads(torch.zeros(1, 48), torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16, 0), (3, 5, 24, 96), (2, 24, 128, 2048)])
def test_gates_of_attention(device: str, dtype: torch.dtype, shape: tuple) -> None:
    n, num_heads, head_dim, rest = shape
    size = num_heads * 2 * head_dim + rest
    projected = random(new_rng(), n, size + 8, dtype=dtype, device=device)[:, :size]
    projected[0, 3], projected[-1, head_dim + 1] = float("nan"), float("-inf")
    heads = projected[:, : size - rest].view(n, num_heads, 2, head_dim)
    query, of_heads = (heads[:, :, i].flatten(1) for i in (0, 1))
    qkv, gates = split_gates(projected, num_heads, head_dim)
    whole = torch.cat([query, projected[:, size - rest :]], 1)
    torch.testing.assert_close(qkv, whole, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(gates, of_heads.contiguous(), rtol=0, atol=0, equal_nan=True)
    attended = query.clone()
    with quiet_numpy():
        assert gate_heads(attended, gates) is attended
    of_torch = query * of_heads.sigmoid()
    assert torch.equal(attended.isfinite(), of_torch.isfinite())
    assert_close(attended.nan_to_num(0.0), of_torch.nan_to_num(0.0).double(), TOLERANCE[dtype])
