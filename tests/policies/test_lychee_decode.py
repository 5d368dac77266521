"""LycheeDecode: roles per KV head, inheritance down the layers, and the four selection rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases.reuse_cases import (
    GROUP_SIZE,
    NUM_LAYERS,
    check_top_k,
    importance_of,
    make_case,
    step_through,
)
from cases.seeded import new_rng

from offload.policies import LycheeDecode
from offload.policies.lychee_decode.policy import enough_for_share
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles, default_retrieval_heads
from offload.selection.policy import RETRIEVE, REUSE

SMALL = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 8}
NUM_KV_HEADS = 2
ROLES = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [0, 0], [0, 1]], bool)


def head_roles(retrieval: np.ndarray = ROLES, head_dim: int = 64) -> HeadRoles:
    return HeadRoles.of(retrieval, head_dim=head_dim)


def sources(retrieval: np.ndarray) -> np.ndarray:
    """[num_layers, num_kv_heads]: the retrieval layer whose tokens each head attends to."""
    layers = np.where(retrieval, np.arange(len(retrieval))[:, None], 0)
    return np.maximum.accumulate(layers)


def test_roles_are_those_of_the_file(tmp_path):
    head_roles().save(tmp_path / "roles.json")
    expected = np.where(ROLES, RETRIEVE, REUSE)
    for given in (head_roles(), tmp_path / "roles.json", str(tmp_path / "roles.json")):
        policy = LycheeDecode(head_roles=given)
        assert policy.head_roles == head_roles()
        np.testing.assert_array_equal(policy.roles(NUM_LAYERS, NUM_KV_HEADS), expected)
    made = make_policy("lychee_decode", head_roles=str(tmp_path / "roles.json"))
    assert made == LycheeDecode(head_roles=head_roles())
    expected[:3] = RETRIEVE
    dense = LycheeDecode(head_roles=head_roles(), dense_layers=3)
    np.testing.assert_array_equal(dense.roles(NUM_LAYERS, NUM_KV_HEADS), expected)


def test_without_roles_a_sixth_of_the_heads_retrieve_evenly_spaced():
    assert default_retrieval_heads(32, 8) == 43
    roles = LycheeDecode().roles(32, 8)
    assert (roles[0] == RETRIEVE).all()
    assert (roles[1:] == RETRIEVE).sum() == 43
    assert set((roles[1:] == RETRIEVE).sum(0)) == {5, 6}
    roles = LycheeDecode(retrieval_heads=5).roles(10, 3)
    assert (roles[1:] == RETRIEVE).sum() == 5
    assert LycheeDecode().roles(1, 4).tolist() == [[RETRIEVE] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_attend_to_what_the_retrieval_head_above_them_found(dtype, pool):
    policy = LycheeDecode(**SMALL, head_roles=head_roles())
    cache, queries = make_case(dtype, rows=2)
    kv_lens = [400, 333]
    selections = step_through(cache, cache.attention(pool, GROUP_SIZE, policy), queries, kv_lens)
    source = sources(ROLES)
    for layer_idx in range(NUM_LAYERS):
        for row, kv_len in enumerate(kv_lens):
            for head in range(NUM_KV_HEADS):
                tokens = selections[layer_idx][row][head]
                if ROLES[layer_idx, head]:
                    assert tokens == []  # all of them: step_through has compared the output
                    continue
                above = source[layer_idx, head]
                importance = importance_of(cache, queries[above][row], above, kv_len)[head]
                check_top_k(tokens, importance, policy, 48 - 12)


def inherited(policy: LycheeDecode, pool, kv_len: int = 400):
    """Per KV head: tokens of layer 1 and float64 importance of layer 0, which alone retrieves."""
    cache, queries = make_case(kv_len=kv_len)
    selections = step_through(cache, cache.attention(pool, GROUP_SIZE, policy), queries, [kv_len])
    return zip(selections[1][0], importance_of(cache, queries[0][0], 0, kv_len), strict=True)


def only_layer_0() -> HeadRoles:
    return head_roles(np.arange(NUM_LAYERS)[:, None].repeat(NUM_KV_HEADS, 1) == 0)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.6, 0.9])
def test_top_p_is_the_smallest_set_that_reaches_p(top_p, pool):
    options = {"budget_tokens": 390, "sink_tokens": 4, "recent_tokens": 8}
    policy = LycheeDecode(**options, head_roles=only_layer_0(), rule="top_p", top_p=top_p)
    for tokens, importance in inherited(policy, pool):
        check_top_k(tokens, importance, policy, len(tokens) - 12)
        weights = importance / GROUP_SIZE
        assert weights[tokens].sum() >= top_p - 1e-5
        if len(tokens) > 12:  # one less would not do
            least = min(weights[token] for token in tokens[4:-8])
            assert weights[tokens].sum() - least < top_p + 1e-5


@pytest.mark.parametrize("rule", [{"top_p": 1.0}, {"threshold": 1e-6}], ids=str)
def test_rules_are_capped_by_the_budget(rule, pool):
    policy = LycheeDecode(**SMALL, head_roles=only_layer_0(), rule=next(iter(rule)), **rule)
    for tokens, importance in inherited(policy, pool):
        check_top_k(tokens, importance, policy, 36)


@pytest.mark.parametrize("threshold", [1e-3, 2e-3, 0.01, 0.5])
def test_threshold(threshold, pool):
    options = {"budget_tokens": 399, "sink_tokens": 4, "recent_tokens": 8}
    policy = LycheeDecode(
        **options, head_roles=only_layer_0(), rule="threshold", threshold=threshold
    )
    for tokens, importance in inherited(policy, pool):
        weights = importance / GROUP_SIZE
        between = set(tokens[4:-8])
        for token in range(4, 392):
            if abs(weights[token] - threshold) > 1e-4 * threshold:
                assert (token in between) == (weights[token] > threshold), token


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.2, 1.0])
def test_ratio_counts_sinks_and_recent_tokens(ratio, pool):
    policy = LycheeDecode(**SMALL, head_roles=only_layer_0(), rule="ratio", ratio=ratio)
    expected = max(0, min(48, math.ceil(ratio * 399)) - 12)
    for tokens, importance in inherited(policy, pool, kv_len=399):
        check_top_k(tokens, importance, policy, expected)


@pytest.mark.parametrize(
    "rule", [{"top_p": 0.3}, {"threshold": 0.02}, {"ratio": 0.3}], ids=lambda rule: next(iter(rule))
)
def test_a_context_that_fits_into_the_budget_is_attended_whole(rule, pool):
    """Whatever the rule: its number counts from the first token beyond."""
    policy = LycheeDecode(**SMALL, head_roles=only_layer_0(), rule=next(iter(rule)), **rule)
    fits = policy.budget_tokens
    assert all(tokens == [] for tokens, _ in inherited(policy, pool, kv_len=fits))
    assert all(0 < len(tokens) < fits for tokens, _ in inherited(policy, pool, kv_len=fits + 1))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.999, 1.1])
def test_enough_for_share_against_sorting(share):
    rng = new_rng()
    importance = (rng.random(300) ** 8).astype(np.float32)
    importance[rng.integers(0, 300, 60)] = 0.25  # ties
    importance[rng.integers(0, 300, 20)] = 0.0
    positions = np.sort(rng.permutation(280)[:200]).astype(np.int32)
    values = importance[10 + positions].astype(np.float64)
    missing = share * values.sum()
    order = np.lexsort((positions, -values))
    needed = int((np.cumsum(values[order]) < missing).sum()) + 1 if missing > 0 else 0
    expected = np.sort(positions[order[:needed]])
    chosen = positions.copy()
    count = enough_for_share(importance, chosen, 10, missing)
    if share <= 1.0:
        np.testing.assert_array_equal(chosen[:count], expected)
    else:
        np.testing.assert_array_equal(chosen[:count], positions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "topk"}, "unknown rule 'topk'; available: top_k, top_p, threshold, ratio"),
        ({"rule": "top_p"}, r"rule='top_p' needs top_p in \(0, 1\], got None"),
        ({"rule": "top_p", "top_p": 1.5}, r"rule='top_p' needs top_p in \(0, 1\], got 1\.5"),
        ({"rule": "ratio", "ratio": 0.0}, r"rule='ratio' needs ratio in \(0, 1\], got 0\.0"),
        ({"rule": "threshold", "threshold": "x"}, r"needs threshold in \(0, 1\], got 'x'"),
        ({"top_p": 0.9}, r"top_p=0\.9 is for rule='top_p', but rule='top_k'"),
        ({"head_roles": 7}, "head_roles must be a roles file or HeadRoles, got 7"),
        ({"budget_tokens": 20}, "budget_tokens=20 cannot hold"),
        ({"roles": "x.json"}, "policy 'lychee_decode' has no option 'roles'"),
        (
            {"head_roles": head_roles(), "retrieval_heads": 4},
            "retrieval_heads=4 is for a calibration, but head_roles say which heads retrieve",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy("lychee_decode", **options)


def test_a_roles_file_that_is_not_there(tmp_path):
    message = "no roles file .*none.json; write one with `offload calibrate MODEL -o .*none.json`"
    with pytest.raises(FileNotFoundError, match=message):
        LycheeDecode(head_roles=str(tmp_path / "none.json"))


def test_roles_of_another_model(tmp_path, pool):
    cache, _ = make_case()
    path = tmp_path / "other.json"
    head_roles(np.ones((30, 3), bool)).save(path)
    message = (
        r"roles file .*other.json was made for another model: it says num_layers=30, "
        r"num_kv_heads=3, head_dim=64, this model has num_layers=6, num_kv_heads=2, head_dim=64"
    )
    with pytest.raises(ValueError, match=message):
        cache.attention(pool, GROUP_SIZE, LycheeDecode(head_roles=str(path)))
    with pytest.raises(ValueError, match="head_dim=128, this model has"):
        cache.attention(pool, GROUP_SIZE, LycheeDecode(head_roles=head_roles(head_dim=128)))
    with pytest.raises(ValueError, match=r"retrieval_heads=11 must be in \[0, 10\]"):
        cache.attention(pool, GROUP_SIZE, LycheeDecode(retrieval_heads=11))
