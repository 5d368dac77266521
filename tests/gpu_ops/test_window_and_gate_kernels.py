"""What kernels do for layers with windows, gates by GELU, normed sums and partial rotation."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, Pages, assert_close, poisoned, random
from cases.seeded import new_rng

from gpu_ops.gemv import gemv
from gpu_ops.paged_attention import retrieval_attention
from gpu_ops.rms_norm import add_normed
from gpu_ops.rope_publish import rope_publish
from gpu_ops.rotate import rotate_tokens
from gpu_ops.silu_mul import activate, silu_mul

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_gelu(device: str, dtype: torch.dtype, bad: float) -> None:
    rng = new_rng()
    gate_up = random(rng, 3, 2 * 70, dtype=dtype, device=device, scale=3.0)
    gate_up[1, 5] = bad
    gate, up = gate_up.double().chunk(2, 1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    out, first = poisoned(3, 70, dtype=dtype, device=device), gate_up[:, :70].contiguous()
    silu_mul(gate_up, out, "gelu_tanh")
    activate(first, gate_up[:, 70:].contiguous(), "gelu_tanh")
    is_good = expected.isfinite()
    for found in (out, first):
        assert torch.equal(found.isfinite(), is_good)
        assert_close(found[is_good], expected[is_good], TOLERANCE[dtype])
    weight = random(rng, 2 * 9, 70, dtype=dtype, device=device, scale=0.1)
    row = poisoned(1, 9, dtype=dtype, device=device)
    gemv(out[:1], weight, row, glu=True, gate="gelu_tanh")
    gate, up = (out[:1].double() @ weight.double().T).chunk(2, 1)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    assert_close(row, gelu * up, 16 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576])
def test_adds_a_norm(device: str, dtype: torch.dtype, size: int) -> None:
    rng = new_rng()
    residual, delta = random(rng, 2, 3, size, dtype=dtype, device=device)
    weight = random(rng, size, dtype=dtype, device=device)
    y = delta.double()
    normed = weight.double() * y / (y.square().mean(1, keepdim=True) + EPS).sqrt()
    expected = residual.double() + normed
    add_normed(residual, delta, weight, EPS)
    assert_close(residual, expected, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 24), (128, 96), (64, 2)])
def test_rotates_a_part(device: str, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    rng = new_rng()
    x = random(rng, 2, 4, head_dim, dtype=dtype, device=device)
    cos, sin = random(rng, 2, 2, rotary_dim, dtype=dtype, device=device)
    low, high = x[:, :3, :rotary_dim].double().chunk(2, -1)
    turned = torch.cat((-high, low), -1) * sin.double()[:, None]
    expected = x[:, :3].double().clone()
    expected[..., :rotary_dim] *= cos.double()[:, None]
    expected[..., :rotary_dim] += turned
    rotated = rotate_tokens(x[:, :3], cos, sin)
    assert_close(rotated, expected, 2 * TOLERANCE[dtype])
    query = poisoned(2, 2 * head_dim, dtype=dtype, device=device)
    positions = torch.tensor([0, 3], device=device)
    window = poisoned(2, 2, 1, 4, head_dim, dtype=dtype, device=device)
    options = {"num_kv_heads": 1, "head_dim": head_dim, "query": query, "window": window}
    rope_publish(x.flatten(1), cos, sin, positions, **options)
    assert torch.equal(query, rotated[:, :2].flatten(1))
    for row, place in enumerate((0, 3)):
        assert torch.equal(window[row, 0, 0, place], rotated[row, 2])
        assert torch.equal(window[row, 1, 0, place], x[row, 3])
    with pytest.raises(ValueError, match="cos and sin must be of 2 to"):
        rotate_tokens(x, cos[:, :1].contiguous(), sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [16, 21, 40])
def test_a_ring_has_the_last_tokens(device: str, dtype: torch.dtype, window: int) -> None:
    """Each token is written in its turn; then the last ones are attended to."""
    rng, num_tokens, head_dim = new_rng(), 45, 32
    ring = [torch.zeros(2, 1, -(-window // 16) * 16, head_dim, dtype=dtype, device=device)]
    pages = Pages(rng, ring, 16)
    cos, sin = (x(1, head_dim, dtype=dtype, device=device) for x in (torch.ones, torch.zeros))
    query = poisoned(1, 2 * head_dim, dtype=dtype, device=device)
    rows = random(rng, num_tokens, 4 * head_dim, dtype=dtype, device=device)
    options = {"num_kv_heads": 1, "query": query, "page_table": pages.table, "page_tokens": 16}
    float32 = {"dtype": torch.float32, "device": device}
    out = poisoned(1, 2 * head_dim, dtype=dtype, device=device)
    for position in range(num_tokens):
        at = torch.tensor([position], device=device)
        rope_publish(rows[position : position + 1], cos, sin, at, ring_tokens=window, **options)
        if position not in (0, window - 1, num_tokens - 1):
            continue
        retrieval_attention(
            query,
            pages.table,
            at,
            None,
            group_size=2,
            page_tokens=16,
            ring_tokens=window,
            sm_scale=0.3,
            partial_out=poisoned(1, 2, 4, head_dim, **float32),
            partial_lse=poisoned(1, 2, 4, **float32),
            out=out,
        )
        seen = rows[max(0, position + 1 - window) : position + 1].double()
        q = query.double().view(2, head_dim)
        keys, values = seen[:, 2 * head_dim : 3 * head_dim], seen[:, 3 * head_dim :]
        expected = (q @ keys.T * 0.3).softmax(-1) @ values
        assert_close(out.view(2, head_dim), expected, 4 * TOLERANCE[dtype])
