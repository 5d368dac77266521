"""merge_state and merge_parts against float64, and parts that are missing or complete."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, attention, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.merge_parts import merge_parts
from gpu_ops.merge_state import merge_state

INFINITY = float("inf")
NAN = float("nan")
# a, lse_a, b, lse_b, what the merge gives
CASES = [
    (1.0, 0.0, 3.0, 0.0, 2.0),
    (1.0, 500.0, 3.0, 500.0, 2.0),
    (1.0, -500.0, 3.0, -500.0, 2.0),
    (1.0, 200.0, 3.0, -200.0, 1.0),
    (1.0, 2.0, NAN, -INFINITY, 1.0),  # the CPU had nothing to attend to
    (NAN, -INFINITY, 3.0, 1.0, 3.0),
    (NAN, -INFINITY, NAN, -INFINITY, 0.0),  # an inactive row
    (1.0, 900.0, 3.0, INFINITY, 3.0),  # the CPU's answer is complete
    (NAN, -INFINITY, 3.0, INFINITY, 3.0),
    (NAN, NAN, 3.0, INFINITY, 3.0),
]


def host(x: torch.Tensor, device: str) -> torch.Tensor:
    """Where the CPU leaves its part."""
    return x.cpu().pin_memory() if device == "cuda" else x.cpu()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size", "split", "has_sinks"),
    combinations(DTYPES, [(64, 3), (128, 4), (96, 1)], [1, 20, 39], [False, True]),
)
def test_parts_make_a_whole(
    device: str, dtype: torch.dtype, head_dim: int, group_size: int, split: int, has_sinks: bool
) -> None:
    rng = new_rng()
    n, heads = 2, 2 * group_size
    query = random(rng, n, heads * head_dim, dtype=torch.float32, device="cpu", scale=3.0)
    keys, values = random(rng, 2, 2, 40, head_dim, dtype=torch.float32, device="cpu")
    sinks = random(rng, heads, dtype=torch.float32, device="cpu", scale=6.0) if has_sinks else None
    whole = torch.stack([attention(q, keys, values, 0.2, sinks)[0] for q in query])
    parts = []
    for tokens in (slice(split), slice(split, None)):
        both = [attention(q, keys[:, tokens], values[:, tokens], 0.2) for q in query]
        parts += [torch.stack(x).float() for x in zip(*both, strict=True)]
    out = poisoned(n, heads * head_dim, dtype=dtype, device=device)
    o_a, lse_a = parts[0].to(device), parts[1].to(device)
    sinks = sinks if sinks is None else sinks.to(device)
    merge_state(o_a, lse_a, host(parts[2], device), host(parts[3], device), out, sinks)
    assert_close(out, whole, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("a", "lse_a", "b", "lse_b", "expected", "sink"),
    [
        *((*case, sink) for case in CASES for sink in (None, -INFINITY)),
        (1.0, 500.0, 3.0, 500.0, 2.0, 300.0),
        (1.0, 0.0, 3.0, -INFINITY, 0.5, 0.0),
        (NAN, -INFINITY, 3.0, 200.0, 1.5, 200.0),
        (1.0, -200.0, 3.0, -200.0, 0.0, 200.0),  # next to nothing is left
        (1.0, 0.0, 3.0, 0.0, 0.0, INFINITY),
        (NAN, -INFINITY, NAN, -INFINITY, 0.0, 200.0),
        (1.0, 0.0, 3.0, 0.0, NAN, NAN),
        *((1.0, 900.0, 3.0, INFINITY, 3.0, sink) for sink in (200.0, INFINITY, NAN)),
    ],
)
def test_weights(
    device: str,
    a: float,
    lse_a: float,
    b: float,
    lse_b: float,
    expected: float,
    sink: float | None,
) -> None:
    o_a, o_b = (torch.full((1, 64), x) for x in (a, b))
    out = poisoned(1, 64, dtype=torch.float32, device=device)
    merge_state(
        o_a.to(device),
        torch.tensor([[lse_a]], device=device),
        host(o_b, device),
        host(torch.tensor([[lse_b]]), device),
        out,
        None if sink is None else torch.tensor([sink], device=device),
    )
    torch.testing.assert_close(
        out.cpu(), torch.full_like(o_a, expected), rtol=0, atol=0, equal_nan=True
    )


def test_wrong_operands() -> None:
    o, lse = torch.zeros(2, 128), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"o_b must be torch.float32, got torch.float16"):
        merge_state(o, lse, o.half(), lse, o.clone())
    with pytest.raises(ValueError, match=r"lse_b must be \[2, 2\], got \[2, 1\]"):
        merge_state(o, lse, o, lse[:, :1], o.clone())
    with pytest.raises(ValueError, match=r"o_a must have 3 heads, got 128 columns"):
        merge_state(o, torch.zeros(2, 3), o, lse, o.clone())
    with pytest.raises(ValueError, match=r"sinks must be \[2\], got \[3\]"):
        merge_state(o, lse, o, lse, o.clone(), torch.zeros(3))


@pytest.mark.cuda
def test_host_memory_must_be_pinned() -> None:
    o, lse = torch.zeros(1, 64, device="cuda"), torch.zeros(1, 1, device="cuda")
    with pytest.raises(ValueError, match=r"o_b must be on cuda:0 or in pinned host memory"):
        merge_state(o, lse, o.cpu(), lse.cpu(), o.clone())


@pytest.mark.parametrize(
    ("dtype", "queries_first", "n", "head_dim"),
    combinations(DTYPES, [False, True], [(1, 16), (16, 48), (37, 128)]),
)
def test_merges(device: str, dtype: torch.dtype, queries_first: bool, n: int, head_dim: int):
    """In either order of heads and queries in memory, where the parts differ much and little."""
    rng = new_rng()
    scores = random(rng, 2, n, 30, dtype=torch.float32, device="cpu", scale=4.0).double()
    scores[:, ::3, :11] += 40
    values = random(rng, 2, 30, head_dim, dtype=torch.float32, device="cpu").double()
    parts = []
    for keys in (slice(0, 11), slice(11, 30)):
        o = (scores[..., keys].softmax(-1) @ values[:, keys]).to(device, dtype)
        if queries_first:
            o = o.transpose(0, 1).contiguous().transpose(0, 1)
        parts += [o, scores[..., keys].logsumexp(-1).float().to(device)]
    in_float32 = parts[0].to(torch.float32, copy=True), parts[1].clone()
    merge_parts(*in_float32, *parts[2:])
    merge_parts(*parts)
    assert_close(in_float32[0], scores.softmax(-1) @ values, TOLERANCE[dtype])
    assert torch.equal(in_float32[1], parts[1])
    assert_close(parts[0], scores.softmax(-1) @ values, TOLERANCE[dtype])
    assert_close(parts[1], scores.logsumexp(-1), 1e-6)


def test_wrong_parts() -> None:
    o, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"part must be \[2, 3, 16\]"):
        merge_parts(o, lse, torch.zeros(2, 4, 16), lse)
    with pytest.raises(ValueError, match="rows of o must be contiguous"):
        merge_parts(torch.zeros(2, 16, 3).mT, lse, o, lse)
    with pytest.raises(ValueError, match=r"part_lse must be \[2, 3\]"):
        merge_parts(o, lse, o, torch.zeros(3, 2))
