"""Every policy beside a GPU that holds sinks and recent tokens.

The merged answer, the selection and what the policy keeps are those of the CPU alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases.attention_cases import TOLERANCE, relative_error
from cases.coprocessor_cases import Shape, World, decode_synchronously, merge
from cases.heavy_hitter import HeavyHitter, HeavyHitterPerQueryHead
from cases.pools import pools
from cases.seeded import new_rng
from cases.slowly import combinations
from numpy.lib.recfunctions import structured_to_unstructured
from test_proposals import EveryThird

from offload.policies import Full, Policy
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles

SMALL = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 8}
DENSE_FIRST = {**SMALL, "dense_layers": 1}
ROLES = HeadRoles.of(np.array([[1, 1], [1, 0], [0, 0]], bool), head_dim=32)

# Models test the other policies with a GPU's window (tests/decode/test_device_decode.py).
POLICIES: dict[str, Callable[[], Policy]] = {
    "full": Full,
    "exact_topk": lambda: make_policy("exact_topk", **DENSE_FIRST),
    "lychee_cluster": lambda: make_policy("lychee_cluster", **DENSE_FIRST),
    "lfps": lambda: make_policy("lfps", **DENSE_FIRST),
    "lfps_bypass": lambda: make_policy("lfps", **DENSE_FIRST, bypass_threshold=0.02),
    "lfps_query_head": lambda: make_policy("lfps", **DENSE_FIRST, granularity="query_head"),
    "per_head_exact": lambda: make_policy(
        "per_head", rest="lfps", retrieval="exact_topk", head_roles=ROLES, **DENSE_FIRST
    ),
    "heavy_hitter": lambda: HeavyHitter(**DENSE_FIRST),
    "heavy_hitter_query_head": lambda: HeavyHitterPerQueryHead(**DENSE_FIRST, num_units=6),
    "every_third": lambda: EveryThird(**DENSE_FIRST),
    "every_third_answers": lambda: EveryThird(**DENSE_FIRST, answers=True),
}
SINKS, RECENT = 4, 8


pool = pools(1, 3)


def windows(policy: Policy) -> dict[str, int]:
    return {} if policy.selects else {"sink_tokens": SINKS, "recent_tokens": RECENT}


@pytest.mark.parametrize(("name", "dtype"), combinations(POLICIES, [torch.float32, torch.bfloat16]))
def test_it_is_the_cpu_alone(name, dtype, pool):
    """Several steps of ragged rows, the short ones growing past the window and the budget."""
    rng = new_rng()
    shape = Shape(dtype=dtype)
    kv_lens = [300, 1, 11, 46, 47, 129]
    policy = POLICIES[name]()
    seed = int(rng.integers(1 << 30))
    alone, beside = (
        World.random(np.random.default_rng(seed), shape, policy, pool, kv_lens) for _ in range(2)
    )
    coprocessor = beside.coprocessor(**windows(policy))
    for _ in range(4):
        given = alone.random_step(rng)
        expected, selections = alone.decode(given)
        out = decode_synchronously(beside, coprocessor, given)
        for layer_idx in range(shape.num_layers):
            error = relative_error(out[layer_idx], expected[layer_idx].double().numpy())
            assert error < 2 * TOLERANCE[dtype], layer_idx
        assert beside.attention.last_selection() == selections[-1]
    for ours, theirs in zip(beside.seqs, alone.seqs, strict=True):
        compare_states(beside, ours, alone, theirs)
        for layer_idx in range(shape.num_layers):
            for x, y in zip(
                beside.store.gather(ours, layer_idx),
                alone.store.gather(theirs, layer_idx),
                strict=True,
            ):
                assert torch.equal(x, y)


def compare_states(beside: World, ours: int, alone: World, theirs: int) -> None:
    """Arrays of the policy; floats may differ by the order of sums."""
    ours_arrays = beside.attention.states.arrays_of(ours)
    their_arrays = alone.attention.states.arrays_of(theirs)
    assert (ours_arrays is None) == (their_arrays is None)
    if ours_arrays is None or their_arrays is None:
        return
    for layer_ours, layer_theirs in zip(ours_arrays.layers, their_arrays.layers, strict=True):
        assert layer_ours.keys() == layer_theirs.keys()
        for name, x in layer_ours.items():
            y = layer_theirs[name]
            if x.dtype.names:
                x, y = structured_to_unstructured(x), structured_to_unstructured(y)
                np.testing.assert_allclose(x, y, rtol=1e-7, atol=0)
            elif x.dtype.kind == "f":
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
            else:  # some scratch holds floats: their last bits, which are less than 1 of a token
                np.testing.assert_allclose(x, y, rtol=1e-7, atol=0)


@pytest.mark.parametrize(("sinks", "recent"), combinations([0, 1, 20], [0, 1, 30]))
def test_any_window_beside_full_attention(sinks, recent, pool):
    """Windows that hold nothing, all but a token, everything, or more than there is."""
    rng = new_rng()
    for kv_len in (1, 2, 19, 20, 21, 49, 50, 51, 52, 64, 257):
        world = World.random(rng, Shape(num_layers=1), Full(), pool, [kv_len - 1])
        coprocessor = world.coprocessor(sink_tokens=sinks, recent_tokens=recent)
        given = world.random_step(rng)
        out = decode_synchronously(world, coprocessor, given)
        expected, _ = world.window_part(given[0][0, 0], 0, 0, kv_len, kv_len, 0)
        assert relative_error(out[0, 0], expected.reshape(-1)) < TOLERANCE[torch.float32]
        lse = coprocessor.mailbox.lse[0]
        assert bool(torch.isneginf(lse).all()) == (kv_len <= sinks + recent)


@pytest.mark.parametrize("sink", [None, 301.0])
def test_an_answered_unit_is_the_whole_answer(sink, pool):
    """Of which its sinks take their share: half, as its lse is the same. In a part they take none:
    they are counted where parts are merged."""
    seed = int(new_rng().integers(1 << 30))
    policy = EveryThird(**SMALL, dense_layers=0, answers=True)
    of_parts = []
    for of_layer in (None, None if sink is None else torch.full((6,), sink)):
        rng = np.random.default_rng(seed)
        options = {"sinks": [of_layer]}
        world = World.random(rng, Shape(num_layers=1), policy, pool, [300], **options)
        coprocessor = world.coprocessor()
        part, answer = decode_synchronously(world, coprocessor, world.random_step(rng))[
            0, 0
        ].reshape(2, -1)
        of_parts.append(part)
    np.testing.assert_array_equal(*of_parts)
    assert (answer == (1.0 if sink is None else 0.5)).all()
    assert torch.isposinf(coprocessor.mailbox.lse[0, 3:]).all()
    assert torch.isfinite(coprocessor.mailbox.lse[0, :3]).all()


def test_merge_takes_all_or_nothing():
    """What the test's own merge does with both kinds of infinity."""
    window = np.ones((2, 4)), np.zeros(2)
    out, lse = torch.full((2, 4), 3.0), torch.tensor([float("-inf"), float("inf")])
    np.testing.assert_array_equal(merge(window, out, lse), [[1.0] * 4, [3.0] * 4])


@pytest.mark.parametrize("name", ["exact_topk", "lfps", "lychee_cluster", "heavy_hitter"])
def test_a_window_that_holds_all_the_mass(name, pool):
    """Weights of what is left to the CPU are too small for a float: that is nothing, not NaN."""
    rng = new_rng()
    shape = Shape(num_layers=2)
    world = World.random(rng, shape, POLICIES[name](), pool, [300])
    coprocessor = world.coprocessor()
    query, _, value = world.random_step(rng)
    heads = query.view(2, 1, shape.num_kv_heads, -1, shape.head_dim)
    heads[:] = heads[:, :, :, :1]  # of a group alike, and so is the newest key, only larger
    given = (query, 100.0 * heads[:, :, :, 0].contiguous(), value)
    out = decode_synchronously(world, coprocessor, given)
    expected = value.repeat_interleave(shape.num_qo_heads // shape.num_kv_heads, dim=2)
    assert relative_error(out[1, 0], expected[1, 0].reshape(-1).double().numpy()) < 1e-5
    if name != "heavy_hitter":  # which gives no weights, and so attends with what it finds here
        assert torch.isneginf(coprocessor.mailbox.lse[0]).all()
