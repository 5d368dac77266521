"""What every registered policy keeps to; a new policy is covered here by its name alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import (
    GROUP_SIZE,
    TOLERANCE,
    Cache,
    assert_same_arrays,
    attend,
    built,
    make_case,
    relative_error,
)
from cases.pairwise import pairwise
from cases.slowly import combinations

from cpu_ops.worker_pool import WorkerPool
from offload.policies import ExactTopK, Full, Policy, StreamingLLM
from offload.policies.base import in_every_layer
from offload.policies.registry import available_policies, make_policy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = {"budget_tokens": 48, "sink_tokens": 4, "dense_layers": 0}
# Policies that reuse selections between layers have tests of their own: one layer is not enough.
SELECTING = [
    name
    for name in available_policies()
    if make_policy(name).selects and make_policy(name).roles(2, 2) is None
]
# Of what is no more than the budget they choose everything.
TAKES_ALL = ("exact_topk", "hard_kv", "quest", "sketch", "lychee_cluster")


def small(name: str, **options: int) -> Policy:
    """The named policy with options small enough for short caches."""
    known = type(make_policy(name)).option_names()
    given = {**OPTIONS, **options}
    if name != "streaming_llm":  # derives its recent window
        given.setdefault("recent_tokens", 8)
    return make_policy(name, **{k: v for k, v in given.items() if k in known})


def run(cache: Cache, policy: Policy, pool: WorkerPool, queries: torch.Tensor, kv_lens: list[int]):
    """o, lse and the selection [row][KV head] of one sparse layer."""
    attention = cache.attention(pool, GROUP_SIZE, policy)
    num_queries = policy.state.observed_queries
    observed = torch.randn(attention.num_qo_heads, num_queries, cache.store.head_dim)
    for layer_idx in range(cache.store.num_layers):
        attention.record_queries(cache.seq, layer_idx, observed.to(queries.dtype), cache.kv_len)
    out, lse = attend(attention, [cache.seq] * len(kv_lens), kv_lens, queries)
    heads = cache.store.num_kv_heads
    flat = [np.array(row, np.int64) for row in attention.last_selection()]
    return out, lse, [flat[i : i + heads] for i in range(0, len(flat), heads)]


@pytest.mark.parametrize(
    ("name", "dtype", "kv_len"), pairwise(available_policies(), DTYPES, [1, 4, 12, 47, 48]), ids=str
)
def test_up_to_the_budget_it_is_full_attention(name, dtype, kv_len, pool):
    cache, queries = make_case(dtype, kv_len, rows=1)
    out, lse, selection = run(cache, small(name), pool, queries, [kv_len])
    full_out, full_lse, _ = run(cache, Full(), pool, queries, [kv_len])
    np.testing.assert_array_equal(out, full_out)
    np.testing.assert_array_equal(lse, full_lse)
    assert all(len(tokens) == 0 for tokens in selection[0])
    expected, _, _ = cache.expected(queries, kv_len)
    assert relative_error(out[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "dtype", "kv_len"), pairwise(SELECTING, DTYPES, [49, 50, 255, 256, 257, 1027]), ids=str
)
def test_selection(name, dtype, kv_len, pool):
    """Sorted, unique, in range, within the budget, sinks and recent tokens in it; and attended."""
    policy = small(name)
    cache, queries = make_case(dtype, kv_len, rows=1)
    out, lse, selection = run(cache, policy, pool, queries, [kv_len])
    assert len(selection[0]) == cache.store.num_kv_heads
    for tokens in selection[0]:
        assert 0 < len(tokens) <= policy.budget_tokens
        assert (np.diff(tokens) > 0).all()
        assert tokens[0] >= 0
        assert tokens[-1] == kv_len - 1
        assert list(tokens[: policy.sink_tokens]) == list(range(policy.sink_tokens))
        recent = range(kv_len - policy.recent_tokens, kv_len)
        assert list(tokens[-policy.recent_tokens :]) == list(recent)
    expected, expected_lse, _ = cache.expected(queries, kv_len, selection[0])
    assert relative_error(out[0], expected) < TOLERANCE[dtype]
    np.testing.assert_allclose(lse[0], expected_lse, atol=2e-4)


@pytest.mark.parametrize(("name", "dense_until"), combinations(SELECTING, [24, 49, 300]))
def test_dense_until_is_not_the_budget(name, dense_until, pool):
    """The budget is the cap alone: shorter sequences select, or longer ones are dense."""
    policy = small(name, dense_until=max(dense_until, small(name).recent_tokens + 16))
    cache, queries = make_case(torch.float32, 400, rows=1)
    for kv_len in (policy.dense_tokens, policy.dense_tokens + 1, policy.dense_tokens + 20):
        out, _, selection = run(cache, policy, pool, queries, [kv_len])
        assert any(len(tokens) for tokens in selection[0]) == (kv_len > policy.dense_tokens)
        if kv_len <= policy.dense_tokens:
            expected, _, _ = cache.expected(queries, kv_len)
        else:
            expected, _, _ = cache.expected(queries, kv_len, selection[0])
        assert relative_error(out[0], expected) < TOLERANCE[torch.float32]
        for tokens in selection[0]:
            assert len(tokens) <= min(kv_len, policy.budget_tokens)
            assert (np.diff(tokens) > 0).all()
            if kv_len <= policy.budget_tokens and policy.name in TAKES_ALL:
                assert len(tokens) == (kv_len if kv_len > policy.dense_tokens else 0)


@pytest.mark.parametrize("wrong", [23, 24.0, True, "all"])
def test_dense_until_holds_sinks_and_recent_window(wrong):
    with pytest.raises(ValueError, match=f"dense_until(=| must be an int, got ).*{wrong}"):
        ExactTopK(budget_tokens=48, sink_tokens=16, recent_tokens=8, dense_until=wrong)


@pytest.mark.parametrize(("name", "sink_tokens"), combinations(SELECTING, [0, 16]))
def test_no_sinks_and_all_sinks(name, sink_tokens, pool):
    """With the whole budget in sinks and the recent window the policy has nothing to choose."""
    cache, queries = make_case(torch.float32, 200, rows=1)
    options = {"budget_tokens": 48, "sink_tokens": sink_tokens}
    if name != "streaming_llm":
        options["recent_tokens"] = 48 - sink_tokens
    _, _, selection = run(cache, small(name, **options), pool, queries, [200])
    window = [*range(sink_tokens), *range(200 - 48 + sink_tokens, 200)]
    assert [list(tokens) for tokens in selection[0]] == [window] * cache.store.num_kv_heads


@pytest.mark.parametrize("name", [n for n in SELECTING if make_policy(n).observe is None])
def test_rows_select_for_themselves(name, pool):
    """A row's selection does not depend on the rows beside it, short ones included.

    Policies that observe learn from the rows before.
    """
    kv_lens = [300, 40, 299, 49]
    cache, queries = make_case(torch.float32, 300, rows=4)
    out, _, selection = run(cache, small(name), pool, queries, kv_lens)
    for row, kv_len in enumerate(kv_lens):
        alone, _, one = run(cache, small(name), pool, queries[row : row + 1], [kv_len])
        if not small(name).state.has_arrays:  # else in turns: only the last one's is known
            for ours, theirs in zip(selection[row], one[0], strict=True):
                np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(out[row], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SELECTING)
def test_dense_layers_attend_to_everything(name, pool):
    cache, queries = make_case(torch.float32, 300, rows=1)
    out, _, selection = run(cache, small(name, dense_layers=2), pool, queries, [300])
    assert all(len(tokens) == 0 for tokens in selection[0])
    expected, _, _ = cache.expected(queries, 300)
    assert relative_error(out[0], expected) < TOLERANCE[torch.float32]
    _, _, selection = run(cache, small(name, dense_layers=1), pool, queries, [300])
    assert all(len(tokens) > 0 for tokens in selection[0])


@pytest.mark.parametrize("name", SELECTING)
def test_nan_in_the_query_is_an_error(name, pool):
    cache, queries = make_case(torch.float32, 300, rows=1)
    queries[0, 70] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite attention in layer 1, query row 0"):
        run(cache, small(name), pool, queries, [300])


@pytest.mark.parametrize("name", [*available_policies(), "hard_kv over quest"])
def test_benches_time_what_selects_in_every_layer(name):
    policy = make_policy("hard_kv", inner="quest") if " " in name else make_policy(name)
    if policy.selects:
        assert policy.members
        assert not any(in_every_layer(x).dense_layers for x in policy.members)


@pytest.mark.parametrize(("dtype", "kv_len"), combinations(DTYPES, [49, 300, 5000]))
def test_exact_topk_keeps_the_largest_weights(dtype, kv_len, pool):
    """The best by float64 weights summed over the group; only near-ties may swap."""
    policy = ExactTopK(budget_tokens=48, sink_tokens=4, recent_tokens=8, dense_layers=0)
    cache, queries = make_case(dtype, kv_len, rows=1)
    _, _, selection = run(cache, policy, pool, queries, [kv_len])
    _, _, weights = cache.expected(queries, kv_len)
    for head, tokens in enumerate(selection[0]):
        importance = sum(weights[head * GROUP_SIZE : (head + 1) * GROUP_SIZE])
        best = 4 + reference.top_k(importance[4 : kv_len - 8], 48 - 12)
        chosen = tokens[4:-8]
        assert len(chosen) == len(best)
        missed = np.sort(importance[np.setdiff1d(best, chosen)])
        instead = np.sort(importance[np.setdiff1d(chosen, best)])
        np.testing.assert_allclose(instead, missed, rtol=1e-4)


@pytest.mark.parametrize("kv_len", [49, 100, 1000])
def test_streaming_llm_keeps_sinks_and_window(kv_len, pool):
    cache, queries = make_case(torch.float32, kv_len, rows=1)
    policy = StreamingLLM(budget_tokens=48, sink_tokens=4, dense_layers=0)
    _, _, selection = run(cache, policy, pool, queries, [kv_len])
    for tokens in selection[0]:
        assert list(tokens) == [*range(4), *range(kv_len - 44, kv_len)]


@pytest.mark.parametrize("name", ["quest", "sketch"])
def test_state_grows_beyond_its_capacity(name, pool):
    policy, keys = small(name), torch.randn(3, 200, 192)
    few, many = (built(policy, keys, capacity_tokens=n, pool=pool) for n in (201, 5000))
    before = {name: array.copy() for name, array in few.items()}
    assert_same_arrays(policy.state.grow(0, few, 5000, pool), many)
    assert_same_arrays(few, before)  # as they were
