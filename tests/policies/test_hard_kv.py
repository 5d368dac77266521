"""HARD-KV: of what another policy selects, the fewest tokens that have a share of the attention."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.coprocessor_cases import SMALL, Shape, World
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.policies import (
    ExactTopK,
    Full,
    HardKV,
    LycheeCluster,
    LycheeDecode,
    PerHead,
    Policy,
    Quest,
    Sketch,
    StreamingLLM,
    TidalDecode,
)
from offload.policies.base import in_every_layer
from offload.policies.registry import make_policy

SHAPE = Shape(group_size=2)
# One query head each: which tokens are heavier does not depend on what else is considered.
SINGLE = Shape(group_size=1)
KV_LENS = [300, 150]
FIRST, LAST = SMALL["sink_tokens"], SMALL["recent_tokens"]
INNER = ("exact_topk", "sketch", "lfps", "lychee_cluster", "union", "per_head")


def world_of(policy: Policy, pool: WorkerPool, shape: Shape = SHAPE) -> World:
    """The same sequences and queries under any policy."""
    world = World.random(new_rng(), shape, policy, pool, KV_LENS)
    world.record_random_queries(new_rng(), KV_LENS)
    return world


def weights(world: World, given, layer_idx: int, row: int, head: int) -> np.ndarray:
    """Exact attention weights of a KV head's tokens, the mean over its query heads, in float64."""
    keys = world.keys[row][layer_idx, :, head].double()
    group = len(given[0][layer_idx, row].view(-1, SHAPE.head_dim)) // SHAPE.num_kv_heads
    query = given[0][layer_idx, row].view(-1, SHAPE.head_dim)[head * group : (head + 1) * group]
    scores = world.attention.sm_scales[0] * query.double() @ keys.T
    return torch.softmax(scores, dim=-1).mean(0).numpy()


def heads_of(world: World):
    for layer_idx in range(SMALL["dense_layers"], SHAPE.num_layers):
        for row in range(len(world.seqs)):
            for head in range(SHAPE.num_kv_heads):
                yield layer_idx, row, head


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.9, 0.99])
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
        share = max(top_p, 1 - 0.5 / SHAPE.group_size)  # no query head keeps less than half
        wanted = int((mass >= share).argmax()) if (mass >= share).any() else len(free)
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


@pytest.mark.parametrize("name", [*INNER, "quest"])
def test_all_of_the_attention_is_the_inner_policy(name, pool):
    inner = make_policy(name, **SMALL)
    ours, alone = (world_of(policy, pool) for policy in (HardKV(inner, 1.0), inner))
    rng = new_rng()
    for _ in range(4):
        given = ours.random_step(rng)
        (out, chosen), (expected, selected) = ours.decode(given), alone.decode(given)
        assert torch.equal(out, expected)
        assert chosen == selected


def test_the_cap_is_not_where_attention_is_full(pool):
    """A share of short sequences, too; and all of those that are longer than the cap."""
    inner = ExactTopK(**SMALL | {"budget_tokens": 200, "dense_until": 100})
    for policy, dense in (
        (HardKV(inner, 0.8, 40), 100),
        (HardKV(replace(inner, dense_until=None), 0.8, 40), 40),
        (HardKV(replace(inner, dense_until=180), 0.8), 180),
    ):
        assert policy.dense_tokens == dense
        world = world_of(policy, pool)
        _, chosen = world.decode(world.random_step(new_rng()))
        for layer_idx, row, head in heads_of(world):
            kept = chosen[layer_idx][row * SHAPE.num_kv_heads + head]
            kv_len = KV_LENS[row] + 1
            assert 0 < len(kept) <= policy.budget_tokens if kv_len > dense else not kept


def test_options():
    policy = make_policy("hard_kv", inner="sketch", top_p=0.9, max_tokens=512, bits=1)
    assert policy == HardKV(Sketch(bits=1), 0.9, 512)
    assert (policy.budget_tokens, policy.inner.budget_tokens) == (512, 1024)
    assert policy.selection_top_p == 0.9
    assert make_policy("hard_kv").inner == make_policy("per_head")
    assert make_policy("hard_kv", budget_tokens=300).budget_tokens == 300
    assert in_every_layer(HardKV(LycheeCluster())).dense_layers == 0
    changed = replace(policy, top_p=0.5)
    assert changed.selection_top_p == 0.5
    assert pickle.loads(pickle.dumps(policy)) == policy
    wrong: tuple[Any, ...] = (0, -1, 1.01, float("nan"), True, "0.9", None)
    for top_p in wrong:
        with pytest.raises(ValueError, match=r"top_p must be a number in \(0, 1\], got"):
            HardKV(Sketch(), top_p)
    wrong = (67, 1025, 512.0, True)
    for cap in wrong:
        with pytest.raises(ValueError, match=r"max_tokens must be in \[68, 1024\], .* of sketch"):
            HardKV(Sketch(), max_tokens=cap)


def test_policies_that_weigh_nothing_or_hand_down_are_refused():
    for policy in (StreamingLLM(), Full(), PerHead(rest=Quest(sink_tokens=16))):
        with pytest.raises(ValueError, match=f"attention weights, which {policy.name} has none of"):
            HardKV(policy)
    for policy in (TidalDecode(), LycheeDecode(), HardKV(Sketch())):
        with pytest.raises(ValueError, match=f"in every layer, which {policy.name} does not; give"):
            HardKV(policy)
    with pytest.raises(ValueError, match="inner must be a policy, got 'sketch'"):
        HardKV("sketch")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [ExactTopK(**SMALL), Sketch(**SMALL)], ids=lambda x: x.name)
def test_no_query_head_of_a_group_is_given_up(policy, pool):
    """One whose attention lies on one far token, beside others that look at sinks."""
    world = world_of(HardKV(policy, 0.5), pool)
    queries = torch.zeros_like(world.random_step(new_rng())[0])
    far = 100
    given = world.random_step(new_rng())
    for layer_idx, row, head in heads_of(world):
        keys = world.keys[row][layer_idx, :, head]
        rows = queries[layer_idx, row].view(-1, SHAPE.head_dim)
        rows[head * SHAPE.group_size] = 40 * keys[0] / keys[0].norm() ** 2 * SHAPE.head_dim**0.5
        target = keys[far] / keys[far].norm() ** 2
        rows[head * SHAPE.group_size + 1] = 40 * target * SHAPE.head_dim**0.5
    _, chosen = world.decode((queries, *given[1:]))
    for layer_idx, row, head in heads_of(world):
        assert far in chosen[layer_idx][row * SHAPE.num_kv_heads + head]
