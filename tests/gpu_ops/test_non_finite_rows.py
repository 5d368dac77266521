"""NaN and infinity pass through the operators beside attention, and stay in their rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases.operands import Pages, poisoned, quiet_numpy, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.chunk_clusters import chunk_boxes, covering_radii
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gemv import gemv
from gpu_ops.rms_norm import add_rms_norm
from gpu_ops.rope_publish import rope_publish
from gpu_ops.rotate import rotate_tokens
from gpu_ops.silu_mul import activate, silu_mul

BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])


@pytest.fixture(autouse=True)
def numbers_that_are_none() -> Iterator[None]:
    with quiet_numpy():
        yield


def normal(device: str, *shape: int) -> torch.Tensor:
    return random(new_rng(), *shape, dtype=torch.float32, device=device)


def check_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The expected numbers, and NaN or infinity nowhere else than expected."""
    finite = expected.isfinite()
    assert not finite.all()
    assert torch.equal(actual.isfinite(), finite)
    torch.testing.assert_close(actual[finite], expected[finite].float(), rtol=1e-5, atol=1e-5)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@BAD
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_rms_norm(device: str, operand: int, bad: float) -> None:
    residual, delta, weight = operands = [normal(device, *s) for s in ((3, 48), (3, 48), (48,))]
    operands[operand][..., 5 if operand == 2 else slice(None)].view(-1)[-1] = bad
    expected = rms_norm(residual + delta, weight)
    out = torch.zeros_like(residual)
    add_rms_norm(residual, delta, weight, 1e-6, out)
    check_numbers(out, expected)


@BAD
@pytest.mark.parametrize("side", [0, 1])
def test_silu_mul(device: str, side: int, bad: float) -> None:
    both = normal(device, 2, 2, 40)
    both[1, side, 7] = bad
    gate, up = both.double().unbind(1)
    expected = gate / (1 + (-gate).exp()) * up
    out = poisoned(2, 40, dtype=torch.float32, device=device)
    silu_mul(both.view(2, 80), out)
    check_numbers(out, expected)
    gate, up = (x.contiguous() for x in both.unbind(1))
    activate(gate, up)
    check_numbers(gate, expected)


@BAD
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_rotate(device: str, operand: int, bad: float) -> None:
    x, cos, sin = operands = [normal(device, *s) for s in ((2, 3, 32), (2, 32), (2, 32))]
    operands[operand][1, ..., 20] = bad
    check_numbers(rotate_tokens(x, cos, sin), rotate(x, cos[:, None], sin[:, None]))


@BAD
@pytest.mark.parametrize("operand", ["q", "k", "v", "k_norm"])
def test_rope_publish(device: str, operand: str, bad: float) -> None:
    """Into everything that it writes: two query heads, one key and one value head."""
    heads, cos, sin = normal(device, 2, 4, 32), normal(device, 2, 32), normal(device, 2, 32)
    q_norm, k_norm = normal(device, 2, 32)
    if operand == "k_norm":
        k_norm[20] = bad
    else:
        heads[1, {"q": 1, "k": 2, "v": 3}[operand], 20] = bad
    q, k = rms_norm(heads[:, :2], q_norm), rms_norm(heads[:, 2:3], k_norm)
    q, k = (rotate(x, cos[:, None], sin[:, None]) for x in (q, k))
    query = poisoned(2, 64, dtype=torch.float32, device=device)
    host_kv = torch.full((2, 2, 1, 32), float("nan"))
    host_kv = host_kv.pin_memory() if device == "cuda" else host_kv
    window = poisoned(2, 2, 1, 4, 32, dtype=torch.float32, device=device)
    rope_publish(
        heads.view(2, -1),
        cos,
        sin,
        torch.tensor([0, 2], device=device),
        num_kv_heads=1,
        query=query,
        host_kv=host_kv,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=1e-6,
        window=window,
        sink_tokens=1,
    )
    if device == "cuda":
        torch.cuda.synchronize()
    expected = torch.cat((q, k, heads[:, 3:].double()), dim=1)
    check_numbers(torch.cat((query.view(2, 2, 32), host_kv[:, :, 0].to(device)), dim=1), expected)
    in_window = torch.stack((window[0, :, 0, 0], window[1, :, 0, 2]))
    assert torch.equal(in_window.isfinite(), expected[:, 2:].isfinite())


@BAD
@pytest.mark.parametrize(
    ("operand", "glu"), combinations(["x", "weight", "bias", "residual", "norm"], [False, True])
)
def test_gemv(device: str, glu: bool, operand: str, bad: float) -> None:
    num_out, num_in = 9, 50
    x, residual = normal(device, 1, num_in), normal(device, 1, num_out)
    weight, bias = normal(device, num_out * (1 + glu), num_in), normal(device, num_out * (1 + glu))
    norm = normal(device, num_in)
    spoiled = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm": norm}[operand]
    spoiled.view(-1)[3] = bad
    y = rms_norm(x, norm) @ weight.double().T + bias
    if glu:
        gate, up = y.chunk(2, dim=-1)
        y = gate / (1 + (-gate).exp()) * up
    out = poisoned(1, num_out, dtype=torch.float32, device=device)
    gemv(x, weight, out, bias=bias, norm=(norm, 1e-6), glu=glu, residual=residual)
    check_numbers(out, y + residual)


@BAD
@pytest.mark.parametrize("side", [0, 1])
def test_gather_rows(device: str, side: int, bad: float) -> None:
    kv = normal("cpu", 2, 2, 20, 16)
    kv[side, 1, 17, 3] = bad
    pages = Pages(new_rng(), [kv], 16)
    held = pages.pages.pin_memory() if device == "cuda" else pages.pages
    table = (pages.table - pages.pages.data_ptr() + held.data_ptr()).to(device)
    out = torch.zeros(1, 2, 2, 4, 16, device=device)
    gather_rows(
        torch.tensor([[[0, 5, 9, 17, 19]]], dtype=torch.int32, device=device)
        .expand(1, 2, 5)
        .clone(),
        torch.full((1, 2), 5, dtype=torch.int32, device=device),
        table,
        torch.tensor([19], device=device),
        torch.arange(2, dtype=torch.int32, device=device),
        num_kv_heads=2,
        page_tokens=16,
        sink_tokens=0,
        recent_tokens=1,
        out=out,
    )
    check_numbers(out[0].cpu(), kv[:, :, [0, 5, 9, 17]].double())


@BAD
def test_chunk_boxes(device: str, bad: float) -> None:
    keys = normal(device, 2, 40, 16)
    keys[1, 12, 3] = bad
    starts = torch.tensor([0, 10, 20, 40], device=device)
    points, centres, _ = chunk_boxes(keys, starts)
    wrong = torch.zeros(2, 3, dtype=torch.bool, device=device)
    wrong[1, 1] = True
    for found in (points, centres):
        assert torch.equal(~found.isfinite().all(-1), wrong)


@BAD
def test_covering_radii(device: str, bad: float) -> None:
    points = normal(device, 1, 40, 16)
    points[0, 12, 3] = bad
    labels = torch.arange(40, device=device)[None] // 10
    units = torch.tensor([[0, 0, 1, 1]], device=device)
    rows = torch.ones(1, 6, 16, dtype=torch.int8, device=device)
    radii = covering_radii(points, labels, units, rows, torch.full((1, 6), 0.1, device=device))
    assert radii.isfinite().tolist() == [[False, True, True, False, True, True]]
