"""A step of the gated delta rule against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from cases.delta_cases import TOLERANCE, expected, made, ordered

from cpu_ops import native
from cpu_ops.delta_rule import DeltaHeads, DeltaRule
from cpu_ops.worker_pool import WorkerPool

# (heads, width of the convolution, rows, by key head): widths that are no whole vectors, too.
CASES = [
    (DeltaHeads(1, 1, 16, 16), 4, 1, False),
    (DeltaHeads(2, 4, 128, 128), 4, 3, True),
    (DeltaHeads(3, 3, 20, 83), 2, 2, False),
    (DeltaHeads(2, 6, 7, 9), 1, 5, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_is_the_reference(isa: str, dtype: torch.dtype, case: tuple) -> None:
    heads, width, n, by_key_head = case
    rule, inputs = made(heads, width, n, dtype)
    inputs["rows"][0, -1] = 30.0  # where softplus is its argument
    of_reference = expected(heads, rule, **inputs)
    kernel = DeltaRule(
        heads,
        rule["conv"],
        (rule["norm"], 1e-5),
        rule["a_log"],
        rule["dt_bias"],
        by_key_head=by_key_head,
        isa=isa,
    )
    pool, found = WorkerPool(2), {name: x.clone() for name, x in inputs.items()}
    rows = ordered(heads, inputs["rows"], by_key_head=by_key_head)
    out = kernel(pool, rows, found["conv_state"], found["state"])
    assert torch.equal(found["conv_state"].double(), of_reference[1])
    for x, reference in ((out, of_reference[0]), (found["state"], of_reference[2])):
        assert (x.double() - reference).norm() / reference.norm() < TOLERANCE[dtype]

    # A number that is none reaches its row and head, and no other.
    for bad in (float("nan"), float("inf")):
        again = {name: x.clone() for name, x in inputs.items()}
        again["state"][0, 0, 0, 0] = bad
        spoilt = kernel(pool, rows, again["conv_state"], again["state"])
        assert not spoilt[0, 0].isfinite()
        assert torch.equal(spoilt[1:], out[1:])
        assert torch.equal(spoilt[0, heads.v_dim :], out[0, heads.v_dim :])
    pool.close()


def test_refuses_what_does_not_fit() -> None:
    heads, pool = DeltaHeads(2, 4, 16, 16), WorkerPool(1)
    rule, inputs = made(heads, 4, 1, torch.float32)
    conv, norm, gates = rule["conv"], (rule["norm"], 1e-5), (rule["a_log"], rule["dt_bias"])
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of num_k_heads=2, got 3"):
        DeltaRule(DeltaHeads(2, 3, 16, 16), conv, norm, *gates)
    with pytest.raises(ValueError, match="conv must be"):
        DeltaRule(heads, conv[1:], norm, *gates)
    kernel = DeltaRule(heads, conv, norm, *gates)
    with pytest.raises(ValueError, match="state must be"):
        kernel(pool, inputs["rows"], inputs["conv_state"], inputs["state"].half())
    pool.close()
