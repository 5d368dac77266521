"""What is not chosen, estimated by clusters: against float64, and while a sequence lives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.attention_cases import (
    GROUP_SIZE,
    TOLERANCE,
    Cache,
    assert_same_arrays,
    attend,
    build_context,
    grow_by_one,
    make_case,
    random_queries,
    relative_error,
)
from cases.pairwise import pairwise
from cases.seeded import new_rng

from cpu_ops.native import available_isas
from offload.policies import ExactTopK, Full, TidalDecode
from offload.policies.registry import available_policies, make_policy
from offload.selection.estimate import (
    NO_CLUSTER,
    Clusters,
    EstimateState,
    cluster_keys,
    estimate_bytes,
    join_clusters,
)
from offload.selection.layer_state import StateShape
from offload.selection.policy import MAX_ESTIMATE_CLUSTERS

OPTIONS = {"budget_tokens": 48, "sink_tokens": 4, "dense_layers": 0}
SELECTING = [
    name
    for name in available_policies()
    if make_policy(name).selects and make_policy(name).roles(2, 2) is None
]


def small(name: str, estimate_clusters: int = 8, **options):
    given = OPTIONS | {"estimate_clusters": estimate_clusters} | options
    if name != "streaming_llm":  # derives its recent window
        given.setdefault("recent_tokens", 8)
    known = type(make_policy(name)).option_names()
    return make_policy(name, **{k: v for k, v in given.items() if k in known})


def arrays_of(attention, seq: int, layer_idx: int = 1):
    return attention.states.arrays_of(seq).layers[layer_idx]


def estimated(cache: Cache, query: torch.Tensor, selection, arrays, kv_len: int):
    """float64 o and lse of chosen tokens and clusters, the count of each without the chosen."""
    head_dim = cache.store.head_dim
    heads = query.double().numpy().reshape(-1, head_dim)
    out, lse = np.zeros_like(heads), np.zeros(len(heads))
    for h, tokens in enumerate(selection):
        cluster_of = arrays["estimate_cluster_of"][h]
        counts = arrays["estimate_counts"][h].astype(np.float64)
        chosen = cluster_of[[t for t in tokens if t < len(cluster_of)]]
        np.subtract.at(counts, chosen[chosen != NO_CLUSTER], 1)
        keys = np.concatenate([cache.keys[h, tokens], arrays["estimate_keys"][h][counts > 0]])
        values = np.concatenate([cache.values[h, tokens], arrays["estimate_values"][h][counts > 0]])
        more = np.concatenate([np.zeros(len(tokens)), np.log(counts[counts > 0])])
        for g in range(h * GROUP_SIZE, (h + 1) * GROUP_SIZE):
            scores = keys.astype(np.float64) @ heads[g] * head_dim**-0.5 + more
            highest = scores.max()
            weights = np.exp(scores - highest)
            out[g] = weights @ values / weights.sum()
            lse[g] = highest + np.log(weights.sum())
    return out, lse


def run(cache, policy, pool, queries, kv_len, isa=None):
    attention = cache.attention(pool, GROUP_SIZE, policy, isa)
    observed = torch.randn(attention.num_qo_heads, policy.state.observed_queries, 64)
    for layer_idx in range(2):
        attention.record_queries(cache.seq, layer_idx, observed.to(queries.dtype), cache.kv_len)
    out, lse = attend(attention, [cache.seq], [kv_len], queries)
    units = [np.array(row, np.int64) for row in attention.last_selection()]
    return attention, out[0], lse[0], units


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(
    ("name", "dtype", "kv_len", "clusters"),
    pairwise(
        ["exact_topk", "lychee_cluster", "streaming_llm", "quest", "sketch"],
        [torch.float32, torch.float16, torch.bfloat16],
        [49, 257, 1027],
        [1, 7, 64, 255],
    ),
    ids=str,
)
def test_as_float64(isa, name, dtype, kv_len, clusters, pool):
    policy = small(name, clusters)
    cache, queries = make_case(dtype, kv_len, rows=1)
    attention, out, lse, selection = run(cache, policy, pool, queries, kv_len, isa)
    arrays = arrays_of(attention, cache.seq)
    assert (arrays["estimate_header"]["end"] == kv_len - policy.recent_tokens).all()
    expected, expected_lse = estimated(cache, queries[0], selection, arrays, kv_len)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected_lse, atol=5e-4)


@pytest.mark.parametrize("name", SELECTING)
def test_every_policy_comes_nearer_to_full_attention(name, pool):
    """Flat attention over topics: a twentieth of the tokens says little, their means all."""
    rng = new_rng()
    cache, _ = make_case(torch.float32, 1000, rows=1)
    queries = 0.2 * random_queries(rng, 1, 2 * GROUP_SIZE, 64, torch.float32)
    full, full_lse, _ = cache.expected(queries[0], 1000)
    errors = {}
    for clusters in (0, 32):
        policy = small(name, clusters)
        attention = cache.attention(pool, GROUP_SIZE, policy)
        observed = torch.randn(attention.num_qo_heads, policy.state.observed_queries, 64)
        for layer_idx in range(2):
            attention.record_queries(cache.seq, layer_idx, observed, cache.kv_len)
        out, lse = attend(attention, [cache.seq], [1000], queries)
        errors[clusters] = relative_error(out[0], full), np.abs(lse[0] - full_lse).max()
    assert errors[32][0] < 0.5 * errors[0][0]
    assert errors[32][1] < 0.1 * errors[0][1]


def test_up_to_the_budget_it_is_full_attention(pool):
    cache, queries = make_case(torch.bfloat16, 48, rows=1)
    _, out, lse, _ = run(cache, small("exact_topk"), pool, queries, 48)
    full_out, full_lse = attend(cache.attention(pool, GROUP_SIZE, Full()), [0], [48], queries)
    np.testing.assert_array_equal(out, full_out[0])
    np.testing.assert_array_equal(lse, full_lse[0])


def test_layers_that_reuse_a_selection(pool):
    """They ask no policy, and estimate all the same."""
    policy = TidalDecode(
        ExactTopK(**OPTIONS | {"recent_tokens": 8, "estimate_clusters": 8}), select_layers=(1,)
    )
    rng = new_rng()
    cache = Cache.random(rng, kv_len=400, num_layers=3, page_tokens=16)
    queries = random_queries(rng, 1, 2 * GROUP_SIZE, 64, torch.float32)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    step = attention.begin_step([cache.seq], [400])
    out = torch.full_like(queries, float("nan"))
    for layer_idx in range(3):
        attention.attend(layer_idx, step, queries, out)
    arrays = arrays_of(attention, cache.seq, 2)
    rolled = Cache(
        cache.store, cache.seq, np.roll(cache.keys, 1, 1), np.roll(cache.values, 0, 1), 2
    )
    selection = [np.array(row, np.int64) for row in attention.last_selection()]
    assert all(len(tokens) == 48 for tokens in selection)
    expected, _ = estimated(rolled, queries[0], selection, arrays, 400)
    actual = out.double().numpy().reshape(-1, 64)
    assert relative_error(actual, expected) < TOLERANCE[torch.float32]
    assert not arrays_of(attention, cache.seq, 1)  # selects with full attention


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_clusters_hold_every_token_once(device, monkeypatch):
    monkeypatch.setattr("offload.selection.estimate._DEVICE_SLICE_ROWS", 8192)
    keys, values = torch.randn(2, 3, 5000, 32).unbind()
    found = cluster_keys(keys.bfloat16().to(device), values.bfloat16().to(device), 16)
    found = Clusters(**{name: x.cpu() for name, x in vars(found).items()})
    assert found.counts.sum(1).tolist() == [5000] * 3
    for h in range(3):
        for c in range(16):
            members = found.cluster_of[h] == c
            assert int(members.sum()) == int(found.counts[h, c])
            for mean, of in ((found.keys, keys), (found.values, values)):
                expected = of[h].bfloat16().double()[members].mean(0)
                assert torch.allclose(mean[h, c].double(), expected, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 16, 17])
def test_few_tokens(num_tokens):
    keys = torch.randn(2, num_tokens, 32)
    found = cluster_keys(keys, keys, 16)
    assert found.counts.sum(1).tolist() == [num_tokens] * 2
    assert torch.isfinite(found.keys).all()


def test_tokens_join_clusters_as_they_leave_the_recent_window(pool):
    """Means and counts are those of the members, and the output follows."""
    policy = small("exact_topk")
    cache, _ = make_case(torch.float32, 300, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    rng = new_rng()
    for _ in range(30):
        key, value = (torch.from_numpy(rng.standard_normal((2, 64)).astype("f4")) for _ in "kv")
        grow_by_one(cache, attention, random_queries(rng, 1, 6, 64, torch.float32), key, value)
        cache.keys = np.concatenate([cache.keys, key.double().numpy()[:, None]], 1)
        cache.values = np.concatenate([cache.values, value.double().numpy()[:, None]], 1)
    arrays = arrays_of(attention, cache.seq)
    end = int(arrays["estimate_header"]["end"][0])
    assert end == 330 - policy.recent_tokens
    for h in range(2):
        cluster_of = arrays["estimate_cluster_of"][h]
        assert (cluster_of[:4] == NO_CLUSTER).all()
        assert (cluster_of[end:] == NO_CLUSTER).all()
        for c in range(8):
            members = np.flatnonzero(cluster_of == c)
            assert arrays["estimate_counts"][h, c] == len(members)
            np.testing.assert_allclose(
                arrays["estimate_keys"][h, c], cache.keys[h, members].mean(0), atol=1e-5
            )
            np.testing.assert_allclose(
                arrays["estimate_values"][h, c], cache.values[h, members].mean(0), atol=1e-5
            )


def test_a_step_is_taken_back_bit_for_bit(pool):
    policy = small("exact_topk")
    cache, queries = make_case(torch.float32, 300, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    new = torch.randn(2, 64)
    grow_by_one(cache, attention, queries, new, new)
    states, arrays = attention.states, arrays_of(attention, cache.seq)
    before = {name: array.copy() for name, array in arrays.items()}
    states.begin([cache.seq], [1], prefill=False)
    cache.store.reserve([cache.seq], [1])
    attend(attention, [cache.seq], [302], queries)
    assert (arrays["estimate_header"]["end"] == 302 - policy.recent_tokens).all()
    states.roll_back(cache.seq)
    after = dict(arrays_of(attention, cache.seq))
    for name in ("estimate_undo", "estimate_header"):
        del before[name], after[name]
    assert_same_arrays(after, before)


def read(cache: Cache, states, n: int, *, fails: bool = False, between=lambda: None) -> None:
    """A prefill of n tokens, after which `between` runs in the same pass."""
    kv_len = cache.store.kv_len(cache.seq)
    states.begin([cache.seq], [n], prefill=True)
    cache.store.reserve([cache.seq], [n])
    for layer_idx in range(2):
        rows = torch.randn(2, n, 2, 64).unbind()
        cache.store.append(cache.seq, layer_idx, *rows)
    cache.store.commit([cache.seq], [n])
    between()
    if fails:
        states.roll_back(cache.seq)
        cache.store.truncate(cache.seq, kv_len)
    else:
        states.commit([cache.seq])


@pytest.mark.parametrize("is_known", [True, False])
def test_a_draft_behind_few_new_tokens_is_taken_back(is_known, pool):
    """Where the pass fails, the clusters have none of its tokens."""
    cache, queries = make_case(torch.float32, 300, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, small("exact_topk"))
    states, new = attention.states, torch.randn(2, 64)
    grow_by_one(cache, attention, queries, new, new)

    def draft() -> None:
        if is_known:
            states.begin_draft([cache.seq])
        for _ in range(3):
            grow_by_one(cache, attention, queries, new, new)

    kept = states.arrays_of(cache.seq)
    read(cache, states, 20, fails=True, between=draft)
    assert (kept.layers[1]["estimate_header"]["end"] == 300 + 1 + 20 + 3 - 8).all()
    grow_by_one(cache, attention, queries, new, new)
    arrays = arrays_of(attention, cache.seq)
    assert (arrays["estimate_header"]["end"] <= 302 - 8).all()
    counted = [(row != NO_CLUSTER).sum() for row in arrays["estimate_cluster_of"]]
    assert (arrays["estimate_counts"].sum(-1) == counted).all()


def test_it_is_known_how_old_what_stays_is(pool):
    """After what fails, from a file, in a fork, and behind a cut."""
    cache, queries = make_case(torch.float32, 300, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, small("exact_topk"))
    states, new, seq = attention.states, torch.randn(2, 64), cache.seq
    grow_by_one(cache, attention, queries, new, new)
    built = states.arrays_of(seq)
    read(cache, states, 200, fails=True, between=lambda: states.ensure(seq, 502))  # built again
    assert states.arrays_of(seq) is built
    fork, loaded = cache.store.fork(seq), cache.store.fork(seq)
    states.fork(seq, fork)
    states.restore(loaded, states.save(fork))
    for cache.seq in (seq, fork, loaded):
        read(cache, states, 20)
        assert states.arrays_of(cache.seq) is not None
        read(cache, states, 20)  # 41 are more than an eighth
        assert states.arrays_of(cache.seq) is None
        states.ensure(cache.seq, cache.store.kv_len(cache.seq) + 1)
        states.truncate(cache.seq, 335)
        cache.store.truncate(cache.seq, 335)
        assert states.arrays_of(cache.seq).num_built == 335
        read(cache, states, 40)
        assert states.arrays_of(cache.seq) is not None
        read(cache, states, 20)
        assert states.arrays_of(cache.seq) is None


def test_growing_keeps_what_is_there(pool):
    state = EstimateState(small("quest"), 8)
    state.asking = state.estimating = frozenset({1})
    keys = torch.randn(3, 200, 64)
    few, many = (state.build(build_context(keys, capacity_tokens=n, pool=pool)) for n in (201, 999))
    before = {name: array.copy() for name, array in few.items()}
    assert_same_arrays(state.grow(1, few, 999, pool), many)
    assert_same_arrays(few, before)


def test_bytes_are_known_before(pool):
    state = EstimateState(small("quest"), 8)
    state.asking = state.estimating = frozenset({1})
    arrays = state.build(build_context(torch.randn(3, 200, 64), capacity_tokens=999, pool=pool))
    own = small("quest").state.build(
        build_context(torch.randn(3, 200, 64), capacity_tokens=999, pool=pool)
    )
    estimating = sum(x.nbytes for name, x in arrays.items() if name not in own)
    assert estimating == 3 * estimate_bytes(8, 64, 999)
    shape = StateShape(
        num_qo_heads=3, num_kv_heads=3, head_dim=64, item_bytes=4, capacity_tokens=999, layer_idx=1
    )
    assert estimating <= state.num_bytes(shape) - small("quest").state.num_bytes(shape)


def test_truncation(pool):
    """As long as only tokens go that are in no cluster."""
    state = EstimateState(small("exact_topk"), 8)
    state.asking = state.estimating = frozenset({1})
    arrays = state.build(build_context(torch.randn(3, 200, 64), pool=pool))
    assert state.truncate(1, arrays, 192)
    assert not state.truncate(1, arrays, 191)


def test_after_a_few_tokens_are_cropped(pool):
    """Some of the recent window are in clusters then, and count once."""
    policy = small("exact_topk")
    cache, queries = make_case(torch.float32, 300, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    attend(attention, [cache.seq], [300], queries)
    for kv_len in (297, 292):
        out, lse = attend(attention, [cache.seq], [kv_len], queries)
        arrays = arrays_of(attention, cache.seq)
        assert (arrays["estimate_header"]["end"] > kv_len - policy.recent_tokens).all()
        selection = [np.array(row, np.int64) for row in attention.last_selection()]
        expected, expected_lse = estimated(cache, queries[0], selection, arrays, kv_len)
        assert relative_error(out[0], expected) < TOLERANCE[torch.float32]
        np.testing.assert_allclose(lse[0], expected_lse, atol=5e-4)


def test_the_sequence_may_be_of_several_rows(pool):
    """A draft's rows, each with its own length."""
    policy = small("exact_topk")
    cache, queries = make_case(torch.float32, 300, rows=3)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    out, _ = attend(attention, [cache.seq] * 3, [298, 299, 300], queries)
    for row, kv_len in enumerate((298, 299, 300)):
        alone = cache.attention(pool, GROUP_SIZE, policy)
        first, _ = attend(alone, [cache.seq], [298], queries[:1])
        for n in range(299, kv_len + 1):
            first, _ = attend(alone, [cache.seq], [n], queries[n - 298 : n - 297])
        np.testing.assert_allclose(out[row], first[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, MAX_ESTIMATE_CLUSTERS + 1, 1.5, True, "64"])
def test_bad_numbers_of_clusters(wrong):
    with pytest.raises(ValueError, match=r"estimate_clusters must be .*got"):
        ExactTopK(estimate_clusters=wrong)


def test_saved_and_forked(pool):
    """The clusters go with a sequence that is saved, and with its forks."""
    cache, queries = make_case(torch.float32, 300, rows=1)
    attention = cache.attention(pool, GROUP_SIZE, small("lychee_cluster"))
    attend(attention, [cache.seq], [300], queries)
    states = attention.states
    child = cache.store.fork(cache.seq)
    states.fork(cache.seq, child)
    assert_same_arrays(arrays_of(attention, child), arrays_of(attention, cache.seq))
    other = cache.store.new_sequence()
    states.restore(other, states.save(cache.seq))
    assert_same_arrays(arrays_of(attention, other), arrays_of(attention, cache.seq))


def test_tokens_join_all_at_once():
    """Those of a sequence that the GPU has decoded: nearest clusters of before, then all means."""
    rng = new_rng()
    keys, values = (torch.from_numpy(rng.standard_normal((2, 90, 64))).float() for _ in range(2))
    policy = small("exact_topk")
    state = EstimateState(policy, 8)
    state.estimating = frozenset({1})
    context = build_context(keys[:, :60], values=values[:, :60], capacity_tokens=128)
    arrays = state.build(context)
    ends = arrays["estimate_header"]["end"]
    end, means = int(ends[0]), arrays["estimate_keys"].copy()
    ends[0] = 70  # the second head goes ahead
    join_clusters(arrays, 70, lambda first: (keys[:, first:70], values[:, first:70]))
    assert (arrays["estimate_cluster_of"][0, end:] == NO_CLUSTER).all()
    ends[0] = end
    join_clusters(arrays, 80, lambda first: (keys[:, first:80], values[:, first:80]))
    assert (ends == 80).all()
    for head, joined in enumerate((80, 70)):
        cosine = keys[head, end:joined].numpy() @ means[head].T
        nearest = (cosine / np.linalg.norm(means[head], axis=-1)).argmax(-1)
        found = arrays["estimate_cluster_of"][head]
        assert (found[end:joined] == nearest).all()
        for cluster in range(8):
            members = np.flatnonzero(found[:80] == cluster)
            assert arrays["estimate_counts"][head, cluster] == len(members)
            for name, x in (("keys", keys), ("values", values)):
                mean = x[head, members].numpy().mean(0)
                assert np.allclose(arrays[f"estimate_{name}"][head, cluster], mean, atol=1e-5)
