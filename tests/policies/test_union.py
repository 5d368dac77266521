"""Union: the heaviest of what both propose, each member as it would be alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import assert_same_arrays, build_context
from cases.coprocessor_cases import SMALL, Shape, World, worlds_alike
from cases.profile_cases import machine_profile, workload
from cases.seeded import new_rng

from cpu_ops.worker_pool import WorkerPool
from offload.planning.step_time import StepModel
from offload.policies import LFPS, ExactTopK, LycheeCluster, LycheeDecode, Policy, Union
from offload.policies.base import in_every_layer
from offload.policies.registry import make_policy
from offload.policies.union.policy import NAMES
from offload.policies.union.step import merge, weights_of
from offload.selection.members import of_member

# One query head each: what is heaviest does not depend on what else is considered.
SINGLE = Shape(group_size=1)
KV_LENS = [300, 150]
FIRST, LAST = SMALL["sink_tokens"], SMALL["recent_tokens"]


def small(name):
    """A member that proposes fewer tokens than there are."""
    policy = make_policy(name, **SMALL)
    return replace(policy, least_candidates=0) if name == "lychee_cluster" else policy


def worlds(policies: list[Policy], pool: WorkerPool) -> list[World]:
    return worlds_alike(policies, SINGLE, pool, KV_LENS)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (7, 0), (1, 1), (300, 40), (500, 500)])
def test_merging_and_taking_apart(sizes):
    rng = new_rng()
    a, b = (np.sort(rng.choice(900, n, replace=False)).astype(np.int32) for n in sizes)
    out = np.full(len(a) + len(b) + 1, -1, np.int32)
    count = merge(a, b, out)
    np.testing.assert_array_equal(out[:count], np.union1d(a, b))
    weights = rng.random(count).astype(np.float32)
    for own, other in ((a, b), (b, a)):
        found = np.full(len(own) + 1, -1, np.float32)
        weights_of(own, other, weights, found[: len(own)])
        np.testing.assert_array_equal(found[:-1], weights[np.isin(out[:count], own)])
        assert found[-1] == -1


@pytest.mark.parametrize("name", ["lfps", "sketch"])
def test_of_a_policy_and_itself_it_is_that_policy(name, pool):
    """Each has its own arrays and numbers, and learns as it would alone."""
    alone = make_policy(name, **SMALL)
    both = Union(alone, replace(alone, budget_tokens=SMALL["budget_tokens"]))
    ours, other = worlds([both, alone], pool)
    rng = new_rng()
    for _ in range(6):
        given = ours.random_step(rng)
        (out, chosen), (expected, selections) = ours.decode(given), other.decode(given)
        assert torch.equal(out, expected)
        assert chosen == selections
    (known, apart) = (
        world.attention.states.arrays_of(world.seqs[0]).layers[2] for world in (ours, other)
    )
    for member in NAMES:
        assert_same_arrays(of_member(known, member), apart)


@pytest.mark.parametrize(
    "others", [("lfps", "lychee_cluster"), ("lychee_cluster", "lfps"), ("sketch", "lychee_cluster")]
)
def test_the_heaviest_of_both_are_attended(others, pool):
    """What a member alone attends to and the union does not, weighs less than all it does."""
    parts = [small(name) for name in others]
    ours, *alone = worlds([Union(*parts), *parts], pool)
    given = ours.random_step(new_rng())
    _, chosen = ours.decode(given)
    apart = [world.decode(given)[1] for world in alone]
    only_one = 0
    for layer_idx in range(SMALL["dense_layers"], SINGLE.num_layers):
        for row, keys in enumerate(ours.keys):
            for unit in range(SINGLE.num_kv_heads):
                query = given[0][layer_idx, row].view(-1, SINGLE.head_dim)[unit].double()
                scores = (keys[layer_idx, :, unit].double() @ query).numpy()
                free = range(FIRST, keys.shape[1] - LAST)
                at = row * SINGLE.num_kv_heads + unit
                union = np.intersect1d(chosen[layer_idx][at], free)
                lists = [np.intersect1d(of[layer_idx][at], free) for of in apart]
                assert len(union) == SMALL["budget_tokens"] - FIRST - LAST
                left = np.setdiff1d(np.union1d(*lists), union)
                assert len(left) == 0 or scores[left].max() <= scores[union].min() + 1e-5
                only_one += any(len(np.setdiff1d(union, tokens)) for tokens in lists)
    assert only_one > 4


def test_what_is_carried_is_of_a_members_own_candidates(pool):
    """LycheeCluster notes what it would alone."""
    alone = small("lychee_cluster")
    ours, other = worlds([Union(small("lfps"), alone), alone], pool)
    given = ours.random_step(new_rng())
    ours.decode(given)
    other.decode(given)
    for layer_idx in range(SMALL["dense_layers"], SINGLE.num_layers):
        known, apart = (
            world.attention.states.arrays_of(world.seqs[0]).layers[layer_idx]
            for world in (ours, other)
        )
        assert apart["carried"][..., 1].max() > 0
        np.testing.assert_array_equal(of_member(known, "second")["carried"], apart["carried"])


def test_what_a_member_answers_is_the_answer(pool):
    """Heads that LFPS bypasses are not attended; LycheeCluster still learns of their tokens."""
    cluster = small("lychee_cluster")
    lfps = make_policy("lfps", bypass_threshold=1e-6, **SMALL)
    all_worlds = worlds([Union(lfps, cluster), Union(cluster, lfps), lfps, cluster], pool)
    rng = new_rng()
    for _ in range(20):
        given = all_worlds[0].random_step(rng)
        *ours, (expected, _), _ = [world.decode(given) for world in all_worlds]
        for out, chosen in ours:
            for layer_idx in range(SMALL["dense_layers"], SINGLE.num_layers):
                assert chosen[layer_idx] == [[]] * len(chosen[layer_idx])
                assert torch.equal(out[layer_idx], expected[layer_idx])
    first, second, _, alone = (
        world.attention.states.arrays_of(world.seqs[0]).layers[2] for world in all_worlds
    )
    for own in (of_member(first, "second"), of_member(second, "first")):
        np.testing.assert_array_equal(own["header"]["indexed_end"], alone["header"]["indexed_end"])
        np.testing.assert_array_equal(own["rows"], alone["rows"])


def test_arrays_of_both(pool):
    """As each builds them, on the host and alongside a prefill, and with more room."""
    policy = make_policy("union", **SMALL)
    assert policy.device.builds
    keys, queries = torch.randn(2, 500, 32), torch.randn(6, 32, 32)
    context = build_context(keys, queries=queries, capacity_tokens=600, pool=pool)
    built, on_device = policy.state.build(context), policy.device.build(context)()
    grown = policy.state.grow(1, built, 900, pool)
    assert grown["candidates"].shape == (2, 900)
    assert built["candidates"].shape == (2, 600)
    for name, part in (("first", policy.first), ("second", policy.second)):
        for arrays, expected in (
            (built, part.state.build(context)),
            (on_device, part.device.build(context)()),
            (grown, part.state.grow(1, part.state.build(context), 900, pool)),
        ):
            assert_same_arrays(of_member(arrays, name), expected)


def test_a_plan_counts_both():
    """What both look at, and no more time than both would take."""
    times = {}
    for name in ("lfps", "lychee_cluster", "union"):
        work = workload(name)
        model = StepModel(machine_profile(), work, on_gpu=False)
        times[name] = model.attend_us(work.roles()[-1], work.unit_members[-1])
    assert max(times["lfps"], times["lychee_cluster"]) < times["union"]
    assert times["union"] < times["lfps"] + times["lychee_cluster"]


def test_defaults():
    """Sinks are those of the member that has more."""
    policy = Union(LFPS(), LycheeCluster())
    assert policy == Union() == make_policy("union")
    assert policy == Union(LFPS(sink_tokens=16), LycheeCluster(sink_tokens=16))
    assert (policy.budget_tokens, policy.sink_tokens, policy.dense_layers) == (1024, 16, 2)
    assert in_every_layer(policy) == make_policy("union", dense_layers=0)
    small = make_policy("union", second="sketch", budget_tokens=320, alpha=0.4, bits=1)
    assert small == Union(LFPS(320, alpha=0.4), make_policy("sketch", budget_tokens=320, bits=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": "lpfs"}, "unknown policy 'lpfs'; available: "),
        ({"first": 3}, "must be a policy, got 3"),
        ({"first": "exact_topk"}, "first must be a policy that proposes .*, got exact_topk"),
        ({"second": "quest"}, "second must be a policy that proposes .*, got quest"),
        ({"second": "full"}, "second must be a policy that proposes .*, got full"),
        ({"second": LycheeDecode()}, "second must be .*, got lychee_decode"),
        ({"second": "per_head"}, "second must be .*, got per_head"),
        ({"granularity": "query_head"}, r"first \(lfps\) selects per query head"),
        ({"first": "sketch", "alpha": 0.2}, "'sketch' and 'lychee_cluster' has no option 'alpha'"),
        ({"alpa": 0.2}, "'union' has no option 'alpa'; its options: first, second, "),
        (
            {"first": LFPS(budget_tokens=512), "second": LycheeCluster()},
            r"budget_tokens must be .* \(lfps\) has 512 and second \(lychee_cluster\) 1024; g",
        ),
        (
            {"first": LFPS(sink_tokens=8), "second": LycheeCluster()},
            r"sink_tokens must be .* \(lfps\) has 8 and second \(lychee_cluster\) 16",
        ),
        (
            {"first": LFPS(recent_tokens=32), "second": LycheeCluster()},
            "recent_tokens must be the same",
        ),
        ({"first": LFPS(dense_layers=0), "second": LycheeCluster()}, "dense_layers must be the s"),
        ({"first": ExactTopK()}, "got exact_topk; give one of these"),
        ({"first": Union()}, "got union; give one of these"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_policy("union", **options)
