"""A step of the gated delta rule against a float64 reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_ops import native
from cpu_ops.delta_rule import DeltaHeads, DeltaRule
from cpu_ops.worker_pool import WorkerPool

# Relative L2. Values are rounded between operators, where only those near a tie may differ.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# (heads, width of the convolution, rows, by key head): widths that are no whole vectors, too.
CASES = [
    (DeltaHeads(1, 1, 16, 16), 4, 1, False),
    (DeltaHeads(2, 4, 128, 128), 4, 3, True),
    (DeltaHeads(3, 3, 20, 83), 2, 2, False),
    (DeltaHeads(2, 6, 7, 9), 1, 5, True),
]


def expected(
    heads: DeltaHeads, rule: dict[str, Tensor], rows: Tensor, conv_state: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out, conv_state and state of rows of [queries, keys, values, gates, betas, alphas], each of
    all heads; float64, with the dtype's rounding where transformers rounds."""
    n, dtype = len(rows), rows.dtype
    key_width, value_width = heads.num_k_heads * heads.k_dim, heads.num_v_heads * heads.v_dim

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    sizes = [heads.channels, value_width, heads.num_v_heads, heads.num_v_heads]
    newest, gate, beta, alpha = rows.double().split(sizes, 1)
    conv_state = torch.cat([conv_state.double(), newest[..., None]], 2)[..., 1:]
    mixed = rounded(F.silu(rounded((conv_state * rule["conv"].double()).sum(2))))
    q, k, v = mixed.split([key_width, key_width, value_width], 1)
    each = heads.num_v_heads // heads.num_k_heads
    q, k = (
        (x / (x.pow(2).sum(2, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 1)
        for x in (y.view(n, heads.num_k_heads, heads.k_dim) for y in (q, k))
    )
    v, gate = (x.view(n, heads.num_v_heads, heads.v_dim) for x in (v, gate))
    rate = rule["a_log"].double().exp()
    decay = (-rate * F.softplus(alpha + rule["dt_bias"].double())).exp()
    state = state.double() * decay[..., None, None]
    delta = (v - torch.einsum("nhkv,nhk->nhv", state, k)) * rounded(beta.sigmoid())[..., None]
    state = state + k[..., None] * delta[..., None, :]
    out = rounded(torch.einsum("nhkv,nhk->nhv", state, q) / heads.k_dim**0.5)
    normed = rounded(out / (out.pow(2).mean(2, keepdim=True) + 1e-5).sqrt())
    out = rounded(rounded(rule["norm"].double() * normed) * F.silu(gate))
    return out.view(n, -1), conv_state, state


Tensors = dict[str, Tensor]


def made(heads: DeltaHeads, width: int, n: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    # A state that decays to nothing becomes k (x) delta, and the output (q k) delta, which the norm
    # makes large whatever q k is: of this seed no q and k are all but orthogonal (of the one
    # before, by 0.001), or the rounding of q k would count a thousandfold.
    generator = torch.Generator().manual_seed(n * width + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rule = {
        "conv": normal(heads.channels, width).to(dtype),
        "norm": (1 + 0.3 * normal(heads.v_dim)).to(dtype),
        "a_log": normal(heads.num_v_heads).to(dtype),
        "dt_bias": normal(heads.num_v_heads).to(dtype),
    }
    inputs = {
        "rows": normal(n, heads.row_size).to(dtype),
        "conv_state": normal(n, heads.channels, width).to(dtype),
        "state": normal(n, heads.num_v_heads, heads.k_dim, heads.v_dim),
    }
    return rule, inputs


def ordered(heads: DeltaHeads, rows: Tensor, *, by_key_head: bool) -> Tensor:
    """Rows as the kernel finds them."""
    if not by_key_head:
        return rows
    n, groups = len(rows), heads.num_k_heads
    widths = [groups * heads.k_dim] * 2 + [heads.num_v_heads * heads.v_dim] * 2
    parts = rows.split([*widths, heads.num_v_heads, heads.num_v_heads], 1)
    by_head = [x.reshape(n, groups, -1) for x in parts]
    return torch.cat([torch.cat(x, 2).view(n, -1) for x in (by_head[:4], by_head[4:])], 1)


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
