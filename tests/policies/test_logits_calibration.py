"""HARD-KV's calibration of page bounds, and what is selected by them, against float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases.attention_cases import built
from cases.coprocessor_cases import SMALL, Shape, World, normal
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.policies import HardKV, Policy, Quest
from offload.policies.hard_kv.logits_calibration import (
    CALIBRATE,
    LEAST_BLOCKS,
    SHARE_OF_TOKENS,
    Blocks,
    inverse_temperatures,
    needed_tokens,
    selected_tokens,
)
from offload.policies.registry import make_policy
from offload.selection.callback import Callback
from offload.selection.layer_state import StateShape

SHAPE = Shape(group_size=2)
KV_LENS = [900, 600]  # more than LEAST_BLOCKS pages
STEEP = 6.0  # queries whose attention is not on everything
FIRST, LAST = SMALL["sink_tokens"], SMALL["recent_tokens"]
OPTIONS: dict[str, Any] = SMALL | {"budget_tokens": 100}


def single_tokens(num_heads: int, kv_len: int, n: int) -> Blocks:
    """Each token for itself, of the last n queries."""
    newest, starts = torch.arange(kv_len - n, kv_len)[:, None], torch.arange(FIRST, kv_len + 1)
    tokens = (starts[:-1] <= newest - LAST).long()
    return Blocks(torch.zeros(num_heads, n, kv_len - FIRST), tokens, starts)


def summed_weights(keys: torch.Tensor, queries: torch.Tensor, num_later: int) -> np.ndarray:
    """float64, of all but the last keys, over the queries of a group."""
    scores = 0.5 * queries.double() @ keys[: len(keys) - num_later].double().T
    return scores.softmax(-1).sum(0).numpy()


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_what_exact_attention_needs(top_p):
    rng, n, group, kv_len = new_rng(), 6, 2, 90
    keys, queries = normal(rng, 2, kv_len, 16), 2 * normal(rng, 4, n, 16)
    sizes = {"sink_tokens": FIRST, "recent_tokens": LAST}
    blocks = single_tokens(2, kv_len, n)
    found = needed_tokens(keys, queries, blocks, in_order=False, sm_scale=0.5, top_p=top_p, **sizes)
    for head in range(2):
        for i in range(n):
            weights = summed_weights(keys[head], queries[group * head :][:group, i], n - i - 1)
            length = len(weights)
            free = -np.sort(-weights[FIRST : length - LAST])
            mass = weights.sum() - free.sum()
            count = 0
            while mass < max(top_p * group, group - 0.5):
                mass, count = mass + free[count], count + 1
            assert found[head, i] == count


def test_what_is_needed_in_the_order_of_blocks():
    """Blocks of 8 tokens by any score; the last few of a window's tokens are in none."""
    rng, n, group, kv_len, top_p = new_rng(), 6, 2, 90, 0.85
    keys, queries = normal(rng, 2, kv_len, 16), 2 * normal(rng, 4, n, 16)
    newest = torch.arange(kv_len - n, kv_len)[:, None]
    starts = FIRST + 8 * torch.arange(10)  # up to 76, of 90 tokens
    tokens = (starts[1:].minimum(newest + 1 - LAST) - starts[:-1]).clamp(min=0)
    blocks = Blocks(normal(rng, 2, n, 9), tokens, starts)
    sizes = {"sink_tokens": FIRST, "recent_tokens": LAST, "sm_scale": 0.5, "top_p": top_p}
    found = needed_tokens(keys, queries, blocks, in_order=True, **sizes)
    heaviest = needed_tokens(keys, queries, blocks, in_order=False, **sizes)
    assert (found >= heaviest).all()
    loose = 0
    for head in range(2):
        for i in range(n):
            weights = summed_weights(keys[head], queries[group * head :][:group, i], n - i - 1)
            length = len(weights)
            last = min(int(starts[-1]), length - LAST)  # from here on all are attended
            mass = weights[:FIRST].sum() + weights[last:].sum()
            free = -np.sort(-weights[FIRST:last])
            missing = max(top_p * group, group - 0.5) - mass
            assert heaviest[head, i] == (np.r_[0.0, np.cumsum(free)] < missing).sum()
            loose += last < length - LAST
            count = 0
            for block in np.argsort(-blocks.scores[head, i].numpy()):
                if mass >= max(top_p * group, group - 0.5):
                    break
                first = int(starts[block])
                inside = weights[first : first + int(tokens[i, block])]
                mass, count = mass + inside.sum(), count + len(inside)
            assert found[head, i] == count
    assert loose


def reference_count(scores, tokens, beta, share) -> float:
    """Tokens of the first blocks that hold a share of the softmax, in float64, one by one."""
    masses = tokens * np.exp(beta * (scores - scores.max()))
    held, count = 0.0, 0.0
    for block in np.argsort(-scores, kind="stable"):
        if held >= share * masses.sum():
            break
        held, count = held + masses[block], count + tokens[block]
    return count


def cases() -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [heads, n, blocks] of heads with steeper and flatter ones, and tokens."""
    scores = normal(new_rng(), 4, 5, 40) * torch.tensor([0.3, 2.0, 8.0, 30.0])[:, None, None]
    tokens = torch.full((5, 40), 16)
    tokens[:, -1], tokens[2, -3:] = 5, 0
    return scores, tokens


def blocks_of(scores: torch.Tensor, tokens: torch.Tensor) -> Blocks:
    return Blocks(scores, tokens, 16 * torch.arange(scores.shape[2] + 1))


@pytest.mark.parametrize("share", [SHARE_OF_TOKENS, 0.95])
def test_temperatures_select_as_many_tokens_as_are_needed(share):
    scores, tokens = cases()
    needed = torch.tensor([[40.0], [90.0], [16.0], [200.0]]).expand(4, 5)
    betas = inverse_temperatures(blocks_of(scores, tokens), needed, 400, share).numpy()
    assert (betas > 0).all()
    for head, beta in enumerate(betas):

        def total(beta: float, head: int = head) -> float:
            of_head = zip(scores[head].double().numpy(), tokens.numpy(), strict=True)
            return sum(reference_count(s[t > 0], t[t > 0], beta, share) for s, t in of_head)

        wanted = float(needed[head].sum())
        assert total(beta * (1 - 1e-4)) >= wanted  # rounded up to blocks
        if beta < np.exp(4.0) * 0.999:  # else even the coldest selects more
            assert total(beta * (1 + 1e-3)) < wanted


def test_more_is_needed_at_a_higher_temperature():
    scores, tokens = cases()
    ranked = scores.masked_fill(tokens == 0, -torch.inf).sort(-1, descending=True).values
    counts = [
        selected_tokens(
            ranked - ranked[..., :1],
            torch.full_like(ranked, 16.0),
            torch.full((4,), beta),
            SHARE_OF_TOKENS,
        )
        for beta in (0.05, 0.3, 1.0, 5.0)
    ]
    for hot, cold in itertools.pairwise(counts):
        assert (hot >= cold).all()
        assert (hot > cold).any()
    needs = [
        inverse_temperatures(blocks_of(scores, tokens), torch.full((4, 5), n), 640, SHARE_OF_TOKENS)
        for n in (20.0, 90.0)
    ]
    assert (needs[0] > needs[1]).all()


def test_where_nothing_can_be_solved_nothing_is_cut():
    scores, tokens = cases()
    needed = torch.full((4, 5), 30.0)
    needed[1] = 400.0  # the flattest softmax selects a third of 629 tokens
    scores[2, 0, 0] = torch.nan
    betas = inverse_temperatures(blocks_of(scores, tokens), needed, 1000, SHARE_OF_TOKENS)
    assert (betas > 0).tolist() == [True, False, False, True]
    assert not inverse_temperatures(
        blocks_of(scores[:, :0], tokens[:0]), needed[:, :0], 10, 0.5
    ).any()


def world_of(policy: Policy, pool: WorkerPool, dtype=torch.float32, kv_lens=KV_LENS) -> World:
    """Under policies that observe as many queries, or of one sequence, the same sequences."""
    shape = Shape(group_size=2, dtype=dtype)
    world, rng = World.random(new_rng(), shape, policy, pool, kv_lens), new_rng()
    for seq, kv_len in zip(world.seqs, kv_lens, strict=True):
        queries = STEEP * normal(rng, shape.num_qo_heads, 64, shape.head_dim).to(dtype)
        for layer_idx in range(shape.num_layers):
            world.attention.record_queries(seq, layer_idx, queries, kv_len)
    return world


def random_step(world: World, rng: np.random.Generator):
    """Queries of the kind that was observed."""
    query, key, value = world.random_step(rng)
    return STEEP / 2 * query, key, value


def page_bounds(world: World, given, layer_idx: int, row: int, head: int):
    """Bounds of all pages in float64 before the recent window, and their tokens."""
    keys = world.keys[row][layer_idx, :, head].double()
    last = len(keys) - LAST
    count = -(-(last - FIRST) // 16)
    count = min(count, (len(keys) - 1 - FIRST) // 16)  # the newest token had no page yet
    pages = keys[FIRST : FIRST + 16 * count].view(count, 16, -1)
    group = SHAPE.group_size
    query = given[0][layer_idx, row].double().view(-1, SHAPE.head_dim)
    query = query[head * group : (head + 1) * group]
    high, low = query.clamp(min=0).sum(0), query.clamp(max=0).sum(0)
    bounds = world.attention.sm_scales[0] * (pages.amax(1) @ high + pages.amin(1) @ low)
    begins = FIRST + 16 * np.arange(count)
    return bounds.numpy(), begins, np.minimum(begins + 16, last)


def chosen_of(world: World, chosen, layer_idx: int, row: int, head: int) -> np.ndarray:
    kept = np.asarray(chosen[layer_idx][row * SHAPE.num_kv_heads + head])
    kv_len = world.keys[row].shape[1]
    assert set(range(FIRST)) | set(range(kv_len - LAST, kv_len)) <= set(kept)
    return kept[(kept >= FIRST) & (kept < kv_len - LAST)]


def heads_of(world: World):
    for layer_idx in range(SMALL["dense_layers"], SHAPE.num_layers):
        for row in range(len(world.seqs)):
            for head in range(SHAPE.num_kv_heads):
                yield layer_idx, row, head


@pytest.mark.parametrize("top_p", [0.6, 0.8])
def test_pages_in_order_until_the_calibrated_softmax_holds_the_share(top_p, pool):
    """Over steps in which pages are completed, and the arrays grow."""
    world, rng = world_of(HardKV(Quest(**OPTIONS), top_p, calibrate="tokens"), pool), new_rng()
    counts = []
    for _ in range(40):
        given = random_step(world, rng)
        _, chosen = world.decode(given)
        for layer_idx, row, head in heads_of(world):
            state = world.attention.states.arrays_of(world.seqs[row]).layers[layer_idx]
            bounds, begins, ends = page_bounds(world, given, layer_idx, row, head)
            beta = float(state["betas"][head])
            kept = chosen_of(world, chosen, layer_idx, row, head)
            wanted = reference_count(bounds, ends - begins, beta, SHARE_OF_TOKENS)
            room = OPTIONS["budget_tokens"] - FIRST - LAST
            loose = world.keys[row].shape[1] - LAST - ends[-1]
            counts.append(len(kept))
            if beta == 0.0:
                assert len(kept) == room
                continue
            assert len(kept) == min(wanted + loose, room)
            taken = np.isin(begins, kept)
            if taken.any() and not taken.all():
                assert bounds[taken].min() >= bounds[~taken].max() - 1e-5
    assert min(counts) < max(counts)


@pytest.mark.parametrize(("calibrate", "budget"), [("mass", 550), ("tokens", 100)])
def test_more_of_the_attention_is_never_fewer_tokens(calibrate, budget, pool):
    shares = (0.3, 0.6, 0.8, 0.95, 0.999)
    quest = Quest(**OPTIONS | {"budget_tokens": budget})
    policies = [HardKV(quest, p, calibrate=calibrate) for p in shares]
    worlds = [world_of(policy, pool) for policy in policies]
    given = random_step(worlds[0], new_rng())
    steps = [world.decode(given)[1] for world in worlds]
    grew = 0
    for layer_idx, row, head in heads_of(worlds[0]):
        kept = [chosen_of(w, s, layer_idx, row, head) for w, s in zip(worlds, steps, strict=True)]
        for fewer, more in itertools.pairwise(kept):
            assert np.isin(fewer, more).all()
            grew += len(more) > len(fewer)
    assert grew > len(shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_what_quest_selects(dtype, pool):
    """Also after tokens were taken back."""
    quest = Quest(**OPTIONS)
    policy = HardKV(quest, 0.7, calibrate="tokens")
    ours, alone = (world_of(x, pool, dtype, KV_LENS[:1]) for x in (policy, quest))
    rng, dropped = new_rng(), 0
    for step in range(30):
        if step == 12:
            for world in (ours, alone):
                world.truncate([x.shape[1] - 7 for x in world.keys])
        given = random_step(ours, rng)
        (_, chosen), (_, selected) = ours.decode(given), alone.decode(given)
        for layer_idx, row, head in heads_of(ours):
            kept, whole = (
                chosen_of(w, c, layer_idx, row, head)
                for w, c in ((ours, chosen), (alone, selected))
            )
            assert np.isin(kept, whole).all()
            dropped += len(whole) - len(kept)
    assert dropped > 0


def test_what_blocks_are_ranked_by_is_what_a_step_ranks_by(pool):
    world = world_of(Quest(**OPTIONS), pool)
    world.decode(world.random_step(new_rng()))
    given = world.random_step(new_rng())
    ranks = world.attention.policy.members[0]
    for row, seq in enumerate(world.seqs):
        before = world.attention.states.ensure(seq, world.store.kv_len(seq)).copy()
        world_query = given[0][:, row].view(SHAPE.num_layers, SHAPE.num_qo_heads, 1, -1)
        arrays = before.layers[1]
        scores, starts = ranks.block_scores(arrays, world_query[1], world.attention.sm_scales[0])
        assert scores.shape == (SHAPE.num_kv_heads, 1, len(starts) - 1)
        assert starts[0] == FIRST
        assert (np.diff(starts) > 0).all()
    world.decode(given)  # row 1 is the last
    after = world.attention.states.arrays_of(world.seqs[1]).layers[1]
    count = scores.shape[2] - LAST // 4 - 1
    np.testing.assert_allclose(
        after["scores"][:, 0, :count], scores[:, 0, :count].numpy(), rtol=1e-4, atol=1e-4
    )


def test_counts_for_queries_after_the_window_are_those_of_exact_top_p():
    """Queries and keys of one kind: the window's temperature is right for those that follow."""
    rng, sizes = new_rng(), {"sink_tokens": FIRST, "recent_tokens": LAST, "top_p": 0.8}
    keys, queries = normal(rng, 4, 1024, 32), 1.5 * normal(rng, 8, 128, 32)
    quest = Quest(**OPTIONS)
    scores, starts = quest.block_scores(built(quest, keys), queries, 32**-0.5)
    newest = torch.arange(1024 - 128, 1024)[:, None]
    tokens = (torch.from_numpy(starts[1:]) <= newest + 1 - LAST) * 16
    each = single_tokens(4, 1024, 128)
    needed = needed_tokens(keys, queries, each, in_order=False, sm_scale=32**-0.5, **sizes)
    window, later = slice(0, 64), slice(64, 128)
    betas = inverse_temperatures(
        blocks_of(scores[:, window], tokens[window]), needed[:, window], 1024, 0.35
    )
    ranked = scores[:, later].masked_fill(tokens[later] == 0, -torch.inf)
    ranked, order = ranked.sort(-1, descending=True)
    ordered = tokens[later].float().expand_as(ranked).gather(-1, order)
    below = (ranked - ranked[..., :1]).clamp(min=-1e30)
    counts = selected_tokens(below, ordered, betas.float(), SHARE_OF_TOKENS).mean(-1)
    np.testing.assert_allclose(counts, needed[:, later].mean(-1), rtol=0.1)


@pytest.mark.parametrize("calibrate", CALIBRATE)
def test_few_blocks_say_nothing_of_the_text_that_follows(calibrate, pool):
    """Built on fewer tokens than the budget, at the end of three times as many."""
    quest = Quest(**OPTIONS)
    ours, alone = (
        world_of(policy, pool, kv_lens=[85])
        for policy in (HardKV(quest, 0.9, calibrate=calibrate), quest)
    )
    rng = new_rng()
    for _ in range(170):
        given = random_step(ours, rng)
        (out, chosen), (expected, selected) = ours.decode(given), alone.decode(given)
    assert torch.equal(out, expected)
    assert chosen == selected
    for layer_idx, row, head in heads_of(ours):
        assert len(chosen_of(ours, chosen, layer_idx, row, head)) == 100 - FIRST - LAST
        state = ours.attention.states.arrays_of(ours.seqs[row]).layers[layer_idx]
        assert not state["betas"][head]


def test_temperatures_need_blocks_to_choose_from():
    scores, tokens = cases()
    for seen in (LEAST_BLOCKS - 1, LEAST_BLOCKS):
        tokens[:, seen:] = 0
        betas = inverse_temperatures(blocks_of(scores, tokens), torch.full((4, 5), 90.0), 400, 0.9)
        assert (betas > 0).all() == betas.any() == (seen == LEAST_BLOCKS)
        tokens = torch.full((5, 40), 16)


def test_calibrations_have_names():
    assert HardKV(Quest(), calibrate="tokens") != HardKV(Quest())
    with pytest.raises(ValueError, match="calibrate must be 'mass' or 'tokens', got 'mas'"):
        make_policy("hard_kv", inner="quest", calibrate="mas")


def test_its_arrays_take_what_is_said(pool):
    policy = HardKV(Quest(**OPTIONS), 0.8)
    world = world_of(policy, pool)
    world.decode(world.random_step(new_rng()))
    for seq in world.seqs:
        arrays = world.attention.states.arrays_of(seq)
        shape = StateShape(SHAPE.num_qo_heads, 2, 32, 4, arrays.capacity_tokens)
        made = sum(array.nbytes for array in arrays.layers[1].values())
        assert made == policy.state.num_bytes(shape)


def test_what_ranks_blocks_by_more_than_its_arrays_is_refused():
    @dataclass(frozen=True)
    class Watches(Quest):
        observe: ClassVar[Callback | None] = Quest.append

    with pytest.raises(ValueError, match="select and append alone, but has append, observe, sele"):
        HardKV(Watches(), 0.9)
