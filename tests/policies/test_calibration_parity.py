"""Calibration in memory that is used again, against the same written plainly, to the bit."""

from __future__ import annotations

import pytest
import torch
from cases.coprocessor_cases import normal
from cases.seeded import new_rng
from torch import Tensor

from offload.policies.logits_calibration import Blocks, inverse_temperatures, needed_tokens

FIRST, LAST, PAGE = 4, 32, 16


def made(dtype: torch.dtype, scale: float, n: int) -> tuple[Tensor, Tensor, Blocks]:
    """Keys of two heads, the second with each key twice, queries, and pages by a made score."""
    rng, kv_len, num_kv_heads, group_size = new_rng(), 900, 2, 3
    keys = normal(rng, num_kv_heads, kv_len, 32)
    keys[1, : kv_len // 2] = keys[1, kv_len // 2 :]
    queries = scale * normal(rng, num_kv_heads * group_size, n, 32)
    starts = FIRST + PAGE * torch.arange((kv_len - FIRST) // PAGE + 1)
    newest = torch.arange(kv_len - n, kv_len)[:, None]
    tokens = (starts[1:].minimum(newest + 1 - LAST) - starts[:-1]).clamp(min=0)
    scores = scale * normal(rng, num_kv_heads, n, len(starts) - 1)
    return keys.to(dtype), queries.to(dtype), Blocks(scores, tokens, starts)


def plainly_needed(keys: Tensor, queries: Tensor, blocks: Blocks, in_order: bool, p: float):
    num_kv_heads, kv_len, head_dim = keys.shape
    n, group_size = queries.shape[1], len(queries) // num_kv_heads
    positions, newest = torch.arange(kv_len), torch.arange(kv_len - n, kv_len)[:, None]
    is_always = (positions < FIRST) | (positions > newest - LAST) | (positions >= blocks.ends())
    mass = group_size * max(p, (group_size - 0.5) / group_size)
    needed = []
    for head, of_head in enumerate(queries.view(num_kv_heads, group_size, n, head_dim)):
        logits = 0.3 * of_head.float() @ keys[head].float().T
        weights = logits.masked_fill(positions > newest, -torch.inf).softmax(-1).sum(0)
        held = weights.masked_fill(is_always, 0.0)
        always = weights.sum(-1, keepdim=True) - held.sum(-1, keepdim=True)
        if in_order:
            block = torch.bucketize(positions, blocks.starts[1:], right=True)
            sums = torch.zeros(n, len(blocks.starts)).index_add_(1, block, held)[:, :-1]
            order = blocks.ranked[1][head]
            held, sizes = sums.gather(-1, order), blocks.tokens.gather(-1, order)
        else:
            held = held.sort(-1, descending=True).values
            sizes = (held > 0.0).long()
        before = always + held.double().cumsum(-1) - held
        needed.append((sizes * (before < mass)).sum(-1).float())
    return torch.stack(needed)


def plainly_solved(blocks: Blocks, needed: Tensor, room: int, share: float) -> Tensor:
    ranked, order = blocks.ranked
    tokens = blocks.tokens.float().expand_as(ranked).gather(-1, order)

    def enough(logs: Tensor) -> Tensor:
        below = (ranked - ranked[..., :1]).clamp(min=-1e30)
        masses = tokens * torch.exp(logs.exp()[:, None, None] * below)
        before = masses.cumsum(-1) - masses
        counts = (tokens * (before < share * masses.sum(-1, keepdim=True))).sum(-1)
        return counts.clamp(max=room).sum(-1) >= needed.clamp(max=room).sum(-1)

    low, high = (torch.full((len(ranked),), x) for x in (-8.0, 4.0))
    solved = enough(low)
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (torch.where(enough(middle), *x) for x in ((middle, low), (high, middle)))
    return torch.where(solved, low.double().exp(), torch.zeros(len(ranked)).double())


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 64])
def test_the_same_to_the_bit(n: int, dtype: torch.dtype, scale: float) -> None:
    keys, queries, blocks = made(dtype, scale, n)
    sizes = {"sm_scale": 0.3, "sink_tokens": FIRST, "recent_tokens": LAST}
    some_solved = False
    for top_p in (0.5, 0.9, 1.0):
        for in_order in (True, False):
            needed = needed_tokens(keys, queries, blocks, in_order=in_order, top_p=top_p, **sizes)
            expected = plainly_needed(keys, queries, blocks, in_order, top_p)
            assert torch.equal(needed, expected)
            for room in (200, 900):
                betas = inverse_temperatures(blocks, needed, room, top_p)
                assert torch.equal(betas, plainly_solved(blocks, expected, room, top_p))
                some_solved |= bool(betas.any())
    assert some_solved
