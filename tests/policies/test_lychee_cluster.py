"""LycheeCluster end to end: bounds, what it selects, streaming, forks, truncation, options."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.lychee_cases import GROUP, HEAD_DIM, KV_HEADS, LycheeIndex, Stream, check_index

from cpu_ops.worker_pool import WorkerPool
from offload.policies.base import State
from offload.policies.lychee_cluster.index import grow_index
from offload.policies.lychee_cluster.layout import STATE
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.lychee_cluster.search import SIZE_OF_BEST
from offload.policies.registry import make_policy

SMALL = LycheeCluster(
    budget_tokens=160, sink_tokens=4, recent_tokens=16, buffer_tokens=48, dense_layers=0
)


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_len", [160, 200, 1000, 4000])
def test_bounds_of_a_built_index(dtype, kv_len, pool):
    stream = Stream(SMALL, pool, dtype=dtype)
    stream.prefill(kv_len)
    stream.step()
    check_index(stream)
    index = stream.index
    assert index.num_clusters == max(1, index.num_chunks // 2)
    assert index.num_units == min(64, round(index.num_clusters**0.5))


@pytest.mark.parametrize("text", [True, False])
def test_thousands_of_grafts(text, pool):
    """Unbounded generation: the index grows, its bounds hold, the buffer stays short."""
    stream = Stream(SMALL, pool, text=text)
    stream.prefill(300)
    for i in range(6000):
        stream.step()
        assert stream.kv_len - stream.index.indexed_end <= SMALL.unindexed_limit
        if i in (0, 40, 300, 1500, 4100, 5999):
            check_index(stream)
    assert stream.index.num_chunks > 6000 / 16
    assert stream.index.indexed_end <= stream.kv_len - SMALL.recent_tokens


def test_an_empty_index_fills_up(pool):
    """A budget just below the length, all of it recent: the first chunk makes the first cluster."""
    policy = replace(SMALL, budget_tokens=40, recent_tokens=30, sink_tokens=4)
    stream = Stream(policy, pool)
    stream.prefill(41)
    stream.step()
    assert stream.index.num_chunks == 0
    for _ in range(200):
        stream.step()
    assert stream.index.num_chunks > 8
    check_index(stream)


def copied(arrays: State) -> State:
    return {name: array.copy() for name, array in arrays.items()}


def snapshot(stream: Stream) -> LycheeIndex:
    """The index as it is: a step may graft after it has searched."""
    return LycheeIndex(copied(stream.index.arrays))


def upper_bounds(stream: Stream, index: LycheeIndex, query: torch.Tensor, head: int) -> np.ndarray:
    """Rank of each cluster for a step's query, float64."""
    centroids, radii = index.centroids()
    heads = query.double().numpy().reshape(KV_HEADS, GROUP, HEAD_DIM)
    total = heads[head].sum(axis=0)
    norms, spreads = index.norms_and_spreads()
    slack = stream.policy.radius_weight * np.linalg.norm(total)
    ranks = norms[head] * (centroids[head] @ total + slack * radii[head]) + slack * spreads[head]
    return ranks[index.num_units :]


@pytest.mark.parametrize("radius_weight", [0.0, 0.35, 1.0])
def test_search_takes_the_clusters_of_largest_bound(radius_weight, pool):
    """With all units kept, nothing outside the best clusters is attended."""
    policy = replace(
        SMALL,
        kept_units=64,
        candidate_ratio=1.0,
        short_context_ratio=1.0,
        radius_weight=radius_weight,
    )
    stream = Stream(policy, pool)
    stream.prefill(3000)
    stream.step()
    for _ in range(30):
        index = snapshot(stream)
        query = stream.step()
        starts = index.starts()
        for head, tokens in enumerate(stream.selection()):
            chosen = tokens[(tokens >= 4) & (tokens < index.indexed_end)]
            chosen = chosen[chosen < stream.kv_len - 16]
            chunks = np.unique(np.searchsorted(starts, chosen, side="right") - 1)
            members = index.members(head)
            order = np.argsort(-upper_bounds(stream, index, query, head))
            sizes = [sum(starts[c + 1] - starts[c] for c in members[i]) for i in order]
            # As many of the best as hold the budget, guessed from the size of clusters.
            wanted = policy.budget_tokens - 20 - max(0, stream.kv_len - 16 - index.indexed_end)
            k = taken = 0
            size = SIZE_OF_BEST * (index.indexed_end - 4) / index.num_clusters
            while taken < wanted:
                k += 1 + int((wanted - taken) / size)
                taken = sum(sizes[:k])
                size = taken / k
            # One more: float32 may see two neighbours in the other order.
            allowed = {c for i in order[: k + 1] for c in members[i]}
            assert set(chunks) <= allowed
            if taken <= wanted:
                assert {c for i in order[: k - 1] for c in members[i]} <= set(chunks)


def test_pruned_units_lose_little(pool):
    """Fewer units make a cheaper search; the best cluster is nearly always still found."""
    stream = Stream(
        replace(SMALL, kept_units=2, candidate_ratio=1.0, short_context_ratio=1.0), pool
    )
    stream.prefill(3000)
    stream.step()
    found = 0
    for _ in range(40):
        index = snapshot(stream)
        query = stream.step()
        starts = index.starts()
        for head, tokens in enumerate(stream.selection()):
            best = int(np.argmax(upper_bounds(stream, index, query, head)))
            newest = index.members(head)[best][0]
            inside = (tokens >= starts[newest]) & (tokens < starts[newest + 1])
            found += bool(inside.any())
    assert found > 0.7 * 40 * KV_HEADS


def test_the_buffer_is_attended_in_full(pool):
    stream = Stream(SMALL, pool)
    stream.prefill(800)
    for _ in range(120):
        end = stream.index.indexed_end if stream.attention.states.arrays_of(stream.seq) else None
        stream.step()
        if end is None:
            continue
        for tokens in stream.selection():
            assert len(tokens) == SMALL.budget_tokens
            assert set(range(end, stream.kv_len)) <= set(tokens.tolist())


def test_selection_has_the_heaviest_candidates(pool):
    """A query along a chunk's keys gets most of the weight that as many tokens can have."""
    stream = Stream(SMALL, pool)
    stream.prefill(4000)
    stream.step()
    starts = stream.index.starts()
    kept = []
    for chunk in stream.rng.integers(0, stream.index.num_chunks - 10, 20):
        keys = stream.keys()[:, starts[chunk] : starts[chunk + 1]].mean(axis=1)
        query = torch.from_numpy(np.repeat(2 * keys, GROUP, axis=0).reshape(1, -1)).float()
        stream.step(query)
        scores = np.einsum("hd,hnd->hn", keys, stream.keys())
        for head, tokens in enumerate(stream.selection()):
            chosen = np.zeros(stream.kv_len, bool)
            chosen[tokens] = True
            weights = np.exp(2 * (scores[head] - scores[head].max()) * HEAD_DIM**-0.5)
            best = np.sort(weights)[-len(tokens) :].sum()
            kept.append(weights[chosen].sum() / best)
    assert np.mean(kept) > 0.35  # ten seeds: 0.44 to 0.53; random tokens: 0.05


def test_forks_have_their_own_index(pool):
    stream = Stream(SMALL, pool)
    stream.prefill(500)
    for _ in range(100):
        stream.step()
    parent = copied(stream.index.arrays)
    child = stream.store.fork(stream.seq)
    stream.attention.states.fork(stream.seq, child)
    first, stream.seq = stream.seq, child
    for _ in range(100):
        stream.step()
    check_index(stream)
    stream.seq = first
    for name, array in stream.index.arrays.items():
        np.testing.assert_array_equal(array, parent[name])


def test_truncation(pool):
    """Tokens of no chunk may go; where a chunk would, the index is built again."""
    stream = Stream(SMALL, pool)
    stream.prefill(500)
    for _ in range(60):
        stream.step()
    end, chunks = stream.index.indexed_end, stream.index.num_chunks
    for kv_len in (end + 5, end):
        stream.store.truncate(stream.seq, kv_len)
        stream.attention.states.truncate(stream.seq, kv_len)
        stream.kv_len = kv_len
        assert stream.index.num_chunks == chunks
        for _ in range(3):
            stream.step()
            for tokens in stream.selection():
                assert (np.diff(tokens) > 0).all()
                assert tokens[-1] == stream.kv_len - 1
                assert len(tokens) <= SMALL.budget_tokens
        check_index(stream)
    stream.store.truncate(stream.seq, end - 1)
    stream.attention.states.truncate(stream.seq, end - 1)
    stream.kv_len = end - 1
    assert stream.attention.states.arrays_of(stream.seq) is None
    stream.step()
    check_index(stream)


def test_growing_keeps_the_index_and_widens_links(pool):
    stream = Stream(SMALL, pool)
    stream.prefill(700)
    stream.step()
    before = stream.index
    grown = LycheeIndex(grow_index(before.arrays, 70000 * 8, SMALL.min_chunk_tokens))
    assert grown.capacity_chunks > 65536
    assert (
        grown.arrays["links_high"].shape == grown.arrays["links"].shape
    )  # the high bits have room now
    np.testing.assert_array_equal(grown.starts(), before.starts())
    for head in range(KV_HEADS):
        assert grown.members(head) == before.members(head)
    state = stream.attention.states.arrays_of(stream.seq)
    assert state is not None
    state.layers[0] = grown.arrays
    state.pointers[0] = STATE.addresses(grown.arrays)
    for _ in range(300):
        stream.step()
    check_index(stream)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_index_bytes(head_dim, pool):
    """At most 1.3 % of the keys and values, at the chunk length of real text (13 tokens)."""
    from offload.policies.base import BuildContext

    kv_len, heads = 8192, 3
    keys = torch.randn(heads, kv_len, head_dim).to(torch.bfloat16)
    marks = np.full(kv_len, 0x40, np.uint8)
    marks[12::13] = 2
    marks[13::13] = 0
    policy = make_policy("lychee_cluster")
    context = BuildContext(
        layer_idx=2,
        keys=keys,
        values=keys,
        queries=keys[:, :0],
        sm_scale=1.0,
        capacity_tokens=kv_len + 1,
        text_marks=marks,
        pool=pool,
    )
    index = LycheeIndex(policy.build(context))
    assert 12 < index.indexed_end / index.num_chunks < 14
    assert index.index_bytes <= 0.013 * 2 * keys.numel() * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_tokens": -1}, "buffer_tokens must be an int in"),
        ({"min_chunk_tokens": 17}, r"min_chunk_tokens must be an int in \[1, 16\], got 17"),
        ({"max_chunk_tokens": 17}, r"max_chunk_tokens must be an int in \[1, 16\], got 17"),
        ({"chunks_per_cluster": 0}, "chunks_per_cluster must be an int in"),
        ({"max_units": 65}, r"max_units must be an int in \[1, 64\], got 65"),
        ({"kept_units": 0}, "kept_units must be an int in"),
        ({"iterations": True}, "iterations must be an int in"),
        ({"short_context_ratio": 65}, r"short_context_ratio must be in \[1, 64\], got 65"),
        ({"candidate_ratio": 0.5}, r"candidate_ratio must be in \[1, 64\], got 0.5"),
        ({"radius_weight": 1.5}, r"radius_weight must be in \[0, 1\], got 1.5"),
        ({"budget_tokens": 79}, "budget_tokens=79 cannot hold"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy("lychee_cluster", **options)
