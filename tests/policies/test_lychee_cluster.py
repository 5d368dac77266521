"""LycheeCluster end to end: bounds, what it selects, streaming, forks, truncation, options."""

from __future__ import annotations

import itertools
from contextlib import closing
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.attention_cases import built
from cases.lychee_cases import GROUP, HEAD_DIM, KV_HEADS, LycheeIndex, Stream, check_index
from cases.slowly import combinations, slow_but

from cpu_ops.worker_pool import WorkerPool
from offload.policies import Sketch, Union
from offload.policies.hard_kv import HardKV
from offload.policies.lychee_cluster.index import grow_index
from offload.policies.lychee_cluster.layout import STATE
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.lychee_cluster.views import ENDS, FOUND, OPENED, RANGES
from offload.policies.registry import make_policy

DEFAULT = LycheeCluster(
    budget_tokens=160, sink_tokens=4, recent_tokens=16, buffer_tokens=48, dense_layers=0
)
SMALL = replace(DEFAULT, least_candidates=0)
FEW_RANKED = replace(SMALL, ranked_chunks=30)


@pytest.mark.parametrize(
    ("dtype", "kv_len", "policy"),
    combinations([torch.float32, torch.bfloat16], [160, 1000, 3000], [SMALL, FEW_RANKED]),
)
def test_a_built_index(policy, dtype, kv_len, pool):
    stream = Stream(policy, pool, dtype=dtype)
    stream.prefill(kv_len)
    stream.step()
    check_index(stream)
    index = stream.index
    num_units = min(128, index.num_chunks // 8) if index.num_chunks > policy.ranked_chunks else 1
    assert index.num_units == num_units


def test_workers_rank_together():
    """More workers than heads and more chunks than one of them ranks: they find the same."""
    policy = replace(SMALL, ranked_chunks=1800)
    found = []
    for num_threads in (1, KV_HEADS + 3):
        with closing(WorkerPool(num_threads)) as pool:
            stream = Stream(policy, pool, text=True)
            stream.prefill(12_000)
            for _ in range(3):
                stream.step()
                assert stream.index.num_chunks > policy.ranked_chunks > 2 * 512
                found.append([tokens.tolist() for tokens in stream.selection()])
    assert found[:3] == found[3:]


def choose_ahead(stream: Stream) -> list[np.ndarray]:
    """What a step chooses without its own token, as for others to attend to."""
    step = stream.attention.begin_step([stream.seq], [stream.kv_len])
    query = torch.ones(1, KV_HEADS * GROUP * HEAD_DIM)
    stream.attention.native.learn(
        0, query.data_ptr(), step.native, False, 0, 0, True, [False] * KV_HEADS
    )
    return stream.selection()


def test_ahead_nothing_is_carried_on(pool):
    """A step that scored its candidates does not have all later ones score theirs."""
    stream = Stream(SMALL, pool)
    stream.prefill(3000)
    stream.step()
    before = stream.index.arrays["carried"].copy()
    assert (before[:, :, 1] > 0).any(axis=1).all()
    stream.store.reserve([stream.seq], [1])
    stream.attention.states.append_delimiter_classes(stream.seq, np.zeros(1, np.uint8))
    stream.store.append(stream.seq, 0, *2 * (stream._keys(1),))
    stream.store.commit([stream.seq], [1])
    stream.kv_len += 1
    assert all(len(tokens) <= SMALL.budget_tokens for tokens in choose_ahead(stream))
    np.testing.assert_array_equal(stream.index.arrays["carried"], before)


@pytest.mark.parametrize("name", ["hard_kv", "union"])
def test_ahead_what_is_scored_is_as_ever(name, pool):
    """Where weights cut the choice, or two lists are merged, all candidates are proposed."""
    sketch = Sketch(budget_tokens=64, sink_tokens=4, recent_tokens=8, dense_layers=0)
    policy = (
        HardKV(sketch, top_p=0.6, max_tokens=64)
        if name == "hard_kv"
        else Union(sketch, replace(SMALL, budget_tokens=64, sink_tokens=4, recent_tokens=8))
    )
    found = []
    for ahead in (False, True):
        stream = Stream(policy, pool, text=False)
        stream.prefill(2000)
        if ahead:
            found.append(choose_ahead(stream))
            continue
        query = torch.ones(1, KV_HEADS * GROUP * HEAD_DIM)
        step = stream.attention.begin_step([stream.seq], [stream.kv_len])
        stream.attention.attend(0, step, query, torch.empty_like(query))
        found.append(stream.selection())
    for tokens, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("text", slow_but([True, False], True))
def test_thousands_of_grafts(text, pool):
    """Unbounded generation: the index grows and holds, the buffer stays short."""
    policy = FEW_RANKED
    stream = Stream(policy, pool, text=text)
    stream.prefill(300)
    for i in range(3000):
        stream.step()
        assert stream.kv_len - stream.index.indexed_end <= policy.unindexed_limit
        if i in (0, 40, 300, 1500, 2999):
            check_index(stream)
    assert stream.index.num_chunks > 3000 / 16
    assert stream.index.indexed_end <= stream.kv_len - SMALL.recent_tokens


def test_an_empty_index_fills_up(pool):
    """A budget just below the length, all of it recent: chunks come one by one."""
    policy = replace(SMALL, budget_tokens=40, recent_tokens=34, sink_tokens=4)
    stream = Stream(policy, pool)
    stream.prefill(41)
    stream.step()
    assert stream.index.num_chunks == 0
    for _ in range(200):
        stream.step()
    assert stream.index.num_chunks > 8
    check_index(stream)


def snapshot(stream: Stream) -> LycheeIndex:
    """The index as it is: a step may graft after it has searched."""
    return LycheeIndex(deepcopy(stream.index.arrays))


def selected_chunks(stream: Stream, index: LycheeIndex) -> list[set[int]]:
    """Chunks of the last step's tokens, of each KV head."""
    found = []
    for tokens in stream.selection():
        chosen = tokens[(tokens >= 4) & (tokens < min(index.indexed_end, stream.kv_len - 16))]
        found.append(set(np.searchsorted(index.starts(), chosen, side="right") - 1))
    return found


def ranks(stream: Stream, index: LycheeIndex, query: torch.Tensor, head: int) -> np.ndarray:
    """Rank of each place for a step's query, float64."""
    heads = query.double().numpy().reshape(KV_HEADS, GROUP, HEAD_DIM)[head]
    centres, widths = (x[head, index.num_units :] for x in index.boxes())
    spread = np.linalg.norm(heads[:, None] * widths, axis=2)
    return (heads @ centres.T + stream.policy.spread_weight * spread).max(axis=0)


@pytest.mark.parametrize("spread_weight", [0.0, 2.4])
def test_search_takes_the_chunks_of_largest_rank(spread_weight, pool):
    """Nothing outside the best chunks is attended."""
    policy = replace(SMALL, carried_share=0.0, candidate_ratio=1.0, spread_weight=spread_weight)
    stream = Stream(policy, pool)
    stream.prefill(3000)
    stream.step()
    for _ in range(30):
        index = snapshot(stream)
        query = stream.step()
        lengths = np.diff(index.starts())
        for head, chunks in enumerate(selected_chunks(stream, index)):
            order = index.order()[head][np.argsort(-ranks(stream, index, query, head))]
            sizes = lengths[order]
            # As many of the best as hold the budget, guessed from the size of chunks.
            wanted = policy.budget_tokens - 20 - max(0, stream.kv_len - 16 - index.indexed_end)
            k = taken = 0
            size = lengths.sum() / len(lengths)
            while taken < wanted:
                k += 1 + int((wanted - taken) / size)
                taken = sum(sizes[:k])
                size = taken / k
            # Rounded queries may see neighbours in another order.
            assert chunks <= set(order[: k + 3])


def test_pruned_units_lose_little(pool):
    """Fewer units make a cheaper search; the best chunk is nearly always still found."""
    policy = replace(SMALL, ranked_chunks=80, candidate_ratio=1.0, carried_share=0.0)
    stream = Stream(policy, pool)
    stream.prefill(3000)
    stream.step()
    found = 0
    for _ in range(40):
        index = snapshot(stream)
        query = stream.step()
        starts = index.starts()
        for head, tokens in enumerate(stream.selection()):
            best = int(np.argmax(ranks(stream, index, query, head)))
            chunk = index.order()[head, best]
            inside = (tokens >= starts[chunk]) & (tokens < starts[chunk + 1])
            found += bool(inside.any())
    assert found > 0.7 * 40 * KV_HEADS


def test_grafted_chunks_are_ranked_whatever_the_units(pool):
    stream = Stream(FEW_RANKED, pool)
    stream.prefill(3000)
    stream.step()
    built = stream.index.num_chunks
    while stream.index.num_chunks < built + 3:
        stream.step()
    index = snapshot(stream)
    stream.step()
    for units in stream.index.arrays["units"]:
        opened = units[OPENED]
        assert units[opened - 1] == index.num_units
        assert units[RANGES + 2 * opened - 1] == index.num_chunks == built + 3
        ranked = units[ENDS + opened - 1]
        assert FEW_RANKED.ranked_chunks + 3 <= ranked < index.num_chunks


def test_what_had_the_most_attention_is_looked_at_again(pool):
    stream = Stream(SMALL, pool)
    stream.prefill(2000)
    stream.step()
    for _ in range(20):
        index = snapshot(stream)
        query = stream.step().double().numpy().reshape(KV_HEADS, GROUP, HEAD_DIM)
        arrays, keys = stream.index.arrays, stream.keys()
        carried = []
        for head, tokens in enumerate(stream.selection()):
            tag, count, *noted = arrays["carried"][head, stream.kv_len & 1]
            assert (tag, count) == (stream.kv_len, SMALL.carried_share * 140)
            indexed = tokens[(tokens >= 4) & (tokens < index.indexed_end)]
            indexed = indexed[indexed < stream.kv_len - 16]
            scores = query[head] @ keys[head].T * HEAD_DIM**-0.5
            weights = np.exp(scores)[:, indexed]
            considered = arrays["candidates"][head, : arrays["units"][head, FOUND]]
            sums = np.exp(scores)[
                :, [*range(4), *considered, *range(index.indexed_end, stream.kv_len)]
            ]
            order = np.argsort(-(weights / sums.sum(axis=1, keepdims=True)).sum(axis=0))
            assert len(set(noted) - set(indexed[order[: count + 1]])) == 0  # one near-tie
            carried.append(noted)
        stream.step()
        for head, noted in enumerate(carried):
            candidates = arrays["candidates"][head, : arrays["units"][head, FOUND]]
            assert (np.diff(candidates) > 0).all()
            assert set(noted) <= set(candidates)


def test_a_small_budget_has_as_many_candidates_as_a_larger_one(pool):
    """And what is chosen among them and the buffer is what weighs most."""
    stream = Stream(replace(DEFAULT, least_candidates=600), pool)
    stream.prefill(3000)
    stream.step()
    for _ in range(20):
        end = stream.index.indexed_end
        query = stream.step().double().numpy().reshape(KV_HEADS, GROUP, HEAD_DIM)
        arrays, keys = stream.index.arrays, stream.keys()
        for head, tokens in enumerate(stream.selection()):
            found = arrays["candidates"][head, : arrays["units"][head, FOUND]]
            candidates = np.union1d(found, np.arange(end, stream.kv_len - 16))
            # 35 are carried; as many chunks as hold 600 tokens of 12, and the best are longer.
            assert 0.9 * 600 <= len(candidates) <= 600 * 16 / 12 + 35
            considered = [*range(4), *candidates, *range(stream.kv_len - 16, stream.kv_len)]
            weights = np.exp(query[head] @ keys[head].T * HEAD_DIM**-0.5)
            weights = (weights / weights[:, considered].sum(axis=1, keepdims=True)).sum(axis=0)
            chosen = tokens[(tokens >= 4) & (tokens < stream.kv_len - 16)]
            others = np.setdiff1d(candidates, chosen)
            assert len(chosen) == 140
            assert weights[others].max() <= weights[chosen].min() * (1 + 1e-4)


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
        assert (stream.index.arrays["carried"][..., 0] <= kv_len).all()
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


def test_growing_keeps_the_index_and_widens_its_order(pool):
    stream = Stream(SMALL, pool)
    stream.prefill(700)
    stream.step()
    before = stream.index
    grown = LycheeIndex(grow_index(before.arrays, 70000 * 8, SMALL.min_chunk_tokens))
    assert grown.capacity_chunks > 65536
    high, low = grown.arrays["order_high"], grown.arrays["order"]
    assert high.shape == low.shape  # the high bits have room now
    np.testing.assert_array_equal(grown.starts(), before.starts())
    np.testing.assert_array_equal(grown.order(), before.order())
    state = stream.attention.states.arrays_of(stream.seq)
    assert state is not None
    state.layers[0] = grown.arrays
    state.pointers[0] = STATE.addresses(grown.arrays)
    for _ in range(300):
        stream.step()
    check_index(stream)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_index_bytes(head_dim, pool):
    """The share of the keys and values, for text in pieces of 13 tokens."""
    kv_len, heads = 8192, 3
    keys = torch.randn(heads, kv_len, head_dim).to(torch.bfloat16)
    marks = np.full(kv_len, 0x40, np.uint8)
    marks[12::13] = 2
    marks[13::13] = 0
    policy = make_policy("lychee_cluster")
    index = LycheeIndex(built(policy, keys, text_marks=marks, pool=pool))
    assert index.indexed_end / index.num_chunks == pytest.approx(13 / 3, rel=0.08)
    assert index.index_bytes <= 0.065 * 2 * keys.numel() * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_tokens": -1}, "buffer_tokens must be an int in"),
        ({"min_chunk_tokens": 6}, r"min_chunk_tokens must be an int in \[1, 5\], got 6"),
        ({"max_chunk_tokens": 17}, r"max_chunk_tokens must be an int in \[1, 16\], got 17"),
        ({"least_candidates": -1}, r"least_candidates must be an int in \[0, 1048576\], got -1"),
        ({"max_units": 129}, r"max_units must be an int in \[1, 128\], got 129"),
        ({"ranked_chunks": 0}, "ranked_chunks must be an int in"),
        ({"iterations": True}, "iterations must be an int in"),
        ({"carried_share": 1.5}, r"carried_share must be in \[0, 1\], got 1.5"),
        ({"candidate_ratio": 0.5}, r"candidate_ratio must be in \[1, 64\], got 0.5"),
        ({"spread_weight": -1}, r"spread_weight must be in \[0, 16\], got -1"),
        ({"budget_tokens": 79}, "budget_tokens=79 cannot hold"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy("lychee_cluster", **options)


def test_a_unit_has_the_box_of_its_chunks(pool):
    """Between their mean and the middle of theirs, two thirds as wide."""
    stream = Stream(replace(SMALL, ranked_chunks=20), pool)
    stream.prefill(2000)
    stream.step()
    index = stream.index
    assert index.num_units > 4
    for head in range(KV_HEADS):
        centres, widths = (x[head] for x in index.boxes())
        first = index.arrays["ranges"][head, : index.num_units + 1]
        for unit, (begin, end) in enumerate(itertools.pairwise(first)):
            of_unit = slice(index.num_units + begin, index.num_units + end)
            low = (centres[of_unit] - widths[of_unit]).min(axis=0)
            high = (centres[of_unit] + widths[of_unit]).max(axis=0)
            centre = centres[of_unit].mean(axis=0) / 2 + (low + high) / 4
            width = (high - low) / 3
            # All of them are rounded to four bits, centres to half a 14th, widths to half a 15th.
            off = np.abs(centres[of_unit]).max() / 14 + widths[of_unit].max() / 30
            assert np.abs(centres[unit] - centre).max() < 0.16 * np.abs(centre).max()
            assert np.abs(widths[unit] - width).max() < 2 / 3 * off + width.max() / 28
