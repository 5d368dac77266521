"""merge_parts against one softmax over all keys."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.merge_parts import merge_parts


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


def test_wrong_operands() -> None:
    o, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"part must be \[2, 3, 16\]"):
        merge_parts(o, lse, torch.zeros(2, 4, 16), lse)
    with pytest.raises(ValueError, match="rows of o must be contiguous"):
        merge_parts(torch.zeros(2, 16, 3).mT, lse, o, lse)
    with pytest.raises(ValueError, match=r"part_lse must be \[2, 3\]"):
        merge_parts(o, lse, o, torch.zeros(3, 2))
