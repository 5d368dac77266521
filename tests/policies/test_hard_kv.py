"""HARD-KV: of what another policy selects, the fewest tokens that have a share of the attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.coprocessor_cases import SMALL, Shape, World, normal
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.policies import ExactTopK, HardKV, LycheeCluster, Policy, Sketch, TidalDecode
from offload.policies.registry import make_policy

SHAPE = Shape(group_size=2)
# One query head each: which tokens are heavier does not depend on what else is considered.
SINGLE = Shape(group_size=1)
KV_LENS = [300, 150]
FIRST, LAST = SMALL["sink_tokens"], SMALL["recent_tokens"]
INNER = ("exact_topk", "sketch", "lfps", "lychee_cluster", "union", "per_head")


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


def world_of(policy: Policy, pool: WorkerPool, shape: Shape = SHAPE) -> World:
    """The same sequences and queries under any policy."""
    world = World.random(new_rng(), shape, policy, pool, KV_LENS)
    rng = new_rng()
    for seq, kv_len in zip(world.seqs, KV_LENS, strict=True):
        queries = normal(rng, shape.num_qo_heads, 32, shape.head_dim)
        for layer_idx in range(shape.num_layers):
            world.attention.record_queries(seq, layer_idx, queries, kv_len)
    return world


def weights(world: World, given, layer_idx: int, row: int, head: int) -> np.ndarray:
    """Exact attention weights of a KV head's tokens, the mean over its query heads, in float64."""
    keys = world.keys[row][layer_idx, :, head].double()
    group = len(given[0][layer_idx, row].view(-1, SHAPE.head_dim)) // SHAPE.num_kv_heads
    query = given[0][layer_idx, row].view(-1, SHAPE.head_dim)[head * group : (head + 1) * group]
    scores = world.attention.sm_scale * query.double() @ keys.T
    return torch.softmax(scores, dim=-1).mean(0).numpy()


def heads_of(world: World):
    for layer_idx in range(SMALL["dense_layers"], SHAPE.num_layers):
        for row in range(len(world.seqs)):
            for head in range(SHAPE.num_kv_heads):
                yield layer_idx, row, head


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9, 0.99])
def test_with_exact_weights_it_is_top_p_with_a_cap(top_p, pool):
    inner = ExactTopK(**SMALL | {"budget_tokens": 120})
    world = world_of(HardKV(inner, top_p), pool)
    given = world.random_step(new_rng())
    _, chosen = world.decode(given)
    counts = []
    for layer_idx, row, head in heads_of(world):
        exact = weights(world, given, layer_idx, row, head)
        kept = np.asarray(chosen[layer_idx][row * SHAPE.num_kv_heads + head])
        always = np.r_[:FIRST, len(exact) - LAST : len(exact)]
        free = np.setdiff1d(np.arange(len(exact)), always)
        by_weight = free[np.argsort(-exact[free], kind="stable")]
        mass = exact[always].sum() + np.r_[0.0, np.cumsum(exact[by_weight])]
        wanted = int((mass >= top_p).argmax()) if (mass >= top_p).any() else len(free)
        wanted = min(wanted, inner.budget_tokens - len(always))
        assert np.isin(always, kept).all()
        assert abs(len(kept) - len(always) - wanted) <= 1
        expected = by_weight[: len(kept) - len(always)]
        np.testing.assert_array_equal(np.setdiff1d(kept, always), np.sort(expected))
        counts.append(len(kept))
    assert min(counts) < max(counts)  # each head has its own number


@pytest.mark.parametrize("name", INNER)
def test_the_heaviest_of_what_the_inner_policy_selects(name, pool):
    inner = make_policy(name, **SMALL)
    ours, alone = (world_of(policy, pool, SINGLE) for policy in (HardKV(inner, 0.6), inner))
    given = ours.random_step(new_rng())
    (_, chosen), (_, selected) = ours.decode(given), alone.decode(given)
    dropped_some = 0
    for layer_idx, row, head in heads_of(ours):
        at = row * SHAPE.num_kv_heads + head
        kept, whole = (np.asarray(of[layer_idx][at]) for of in (chosen, selected))
        assert np.isin(kept, whole).all()
        exact = weights(ours, given, layer_idx, row, head)
        always = np.r_[:FIRST, len(exact) - LAST : len(exact)]
        dropped, free = np.setdiff1d(whole, kept), np.setdiff1d(kept, always)
        if len(dropped) and len(free):
            assert exact[dropped].max() <= exact[free].min() * (1 + 1e-5)
        dropped_some += len(dropped) > 0
    assert dropped_some


@pytest.mark.parametrize("name", INNER)
def test_all_of_the_attention_is_the_inner_policy(name, pool):
    inner = make_policy(name, **SMALL)
    ours, alone = (world_of(policy, pool) for policy in (HardKV(inner, 1.0), inner))
    rng = new_rng()
    for _ in range(4):
        given = ours.random_step(rng)
        (out, chosen), (expected, selected) = ours.decode(given), alone.decode(given)
        assert torch.equal(out, expected)
        assert chosen == selected


def test_options():
    policy = make_policy("hard_kv", inner="sketch", top_p=0.9, max_tokens=512, bits=1)
    assert policy == HardKV(Sketch(budget_tokens=512, bits=1), 0.9)
    assert (policy.budget_tokens, policy.selection_top_p) == (512, 0.9)
    assert make_policy("hard_kv").inner == make_policy("auto")
    assert make_policy("hard_kv", budget_tokens=300).budget_tokens == 300
    assert HardKV(LycheeCluster()).in_every_layer().dense_layers == 0
    changed = replace(policy, top_p=0.5)
    assert changed.selection_top_p == 0.5
    for top_p in (0, -1, 1.01, float("nan"), True):
        with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got"):
            HardKV(Sketch(), top_p)
    with pytest.raises(ValueError, match="max_tokens=5 and budget_tokens=6 are the same cap"):
        make_policy("hard_kv", max_tokens=5, budget_tokens=6)


@pytest.mark.parametrize("name", ["quest", "streaming_llm", "full", "tidal_decode", "lychee_decode"])
def test_policies_that_weigh_nothing_or_hand_down_are_refused(name):
    with pytest.raises(ValueError, match=f"attention weights, which {name} does not have in every"):
        HardKV(make_policy(name))
    with pytest.raises(ValueError, match="which hard_kv does not have in every layer; give an inner"):
        HardKV(HardKV(Sketch()))
    with pytest.raises(ValueError, match="inner must be a policy, got 'sketch'"):
        HardKV("sketch")  # type: ignore[arg-type]
    assert isinstance(TidalDecode().inner, ExactTopK)
