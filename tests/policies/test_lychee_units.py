"""LycheeCluster's grafted chunks get their coarse units where the arrays grow."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from cases.lychee_cases import KV_HEADS, LycheeIndex, Stream, check_index

from cpu_ops.worker_pool import WorkerPool
from offload.policies.lychee_cluster.index import UNIT_WIDTHS
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.lychee_cluster.views import ENDS, OPENED
from offload.selection import sequence_state
from offload.selection.layer_state import State

POLICY = LycheeCluster(
    budget_tokens=160,
    sink_tokens=4,
    recent_tokens=16,
    buffer_tokens=48,
    dense_layers=0,
    least_candidates=0,
    ranked_chunks=100,
)
STEP = 200  # tokens after which the arrays grow
INDEX = ("header", "rows", "scales", "ranges", "order", "order_high", "blocks", "offsets")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_state, "_CAPACITY_STEP", STEP)


def built_anew(stream: Stream) -> State:
    """The index of another sequence with the same tokens, which has not been decoded."""
    store, states, n = stream.store, stream.attention.states, stream.kv_len
    seq = store.new_sequence()
    store.reserve([seq], [n])
    keys, values = (x.transpose(0, 1).contiguous() for x in store.gather(stream.seq, 0))
    store.append(seq, 0, keys, values)
    store.commit([seq], [n])
    states.append_delimiter_classes(seq, states.marks_of(stream.seq)[:n].copy())
    return states.ensure(seq, n).layers[0]


def ranked(index: LycheeIndex) -> list[int]:
    """Chunks that the last search ranked, of each KV head."""
    return [int(units[ENDS + units[OPENED] - 1]) for units in index.arrays["units"]]


def box_of_chunk(index: LycheeIndex, head: int) -> dict[int, tuple[bytes, bytes]]:
    """The bytes and scales by which each chunk is ranked; every chunk has one place."""
    order = index.order()[head].tolist()
    assert sorted(order) == list(range(index.num_chunks))
    rows, scales = index.arrays["rows"][head], index.arrays["scales"][head]
    first = index.num_units
    return {
        chunk: (rows[first + place].tobytes(), scales[:, first + place].tobytes())
        for place, chunk in enumerate(order)
    }


@pytest.mark.parametrize("kv_len", [250, 700], ids=["no units", "units"])
def test_growing_puts_grafts_below_units(kv_len, pool):
    stream = Stream(POLICY, pool)
    stream.prefill(kv_len)
    for _ in range(500):
        stream.step()
    index = stream.index
    built = index.arrays["ranges"][0, index.num_units]
    assert 1.5 * POLICY.ranked_chunks < index.num_chunks
    assert built < index.num_chunks  # the rest are grafted
    given, old = deepcopy(index.arrays), LycheeIndex(deepcopy(index.arrays))
    grown = LycheeIndex(POLICY.state.grow(0, index.arrays, 2000, pool))
    for name, array in given.items():  # a step that fails goes on with it
        np.testing.assert_array_equal(index.arrays[name], array)
    of_new_units = POLICY.num_units(int(old.num_chunks / 1.5))
    assert grown.num_units == (old.num_units if old.num_units > 1 else of_new_units)
    np.testing.assert_array_equal(grown.starts(), old.starts())
    centres, widths = grown.boxes()
    units, chunks = slice(0, grown.num_units), slice(grown.num_units, None)
    for head in range(KV_HEADS):
        assert box_of_chunk(grown, head) == box_of_chunk(old, head)
        ranges = grown.arrays["ranges"][head]
        unit_of = grown.units(head)
        assert ranges[grown.num_units] == grown.num_chunks == len(unit_of)
        for unit, (centre, width) in enumerate(
            zip(centres[head, units], widths[head, units], strict=True)
        ):
            below = centres[head, chunks][unit_of == unit]
            half = widths[head, chunks][unit_of == unit]
            low, high = (below - half).min(axis=0), (below + half).max(axis=0)
            expected = below.mean(axis=0) / 2 + (low + high) / 4
            assert np.abs(centre - expected).max() < 0.51 * 1.01 / 7 * np.abs(expected).max()
            expected = UNIT_WIDTHS * (high - low) / 2
            assert np.abs(width - expected).max() < 0.51 * 1.01 / 15 * expected.max()
    again = POLICY.state.grow(0, given, 2000, WorkerPool(3))  # however many threads
    for name, array in grown.arrays.items():
        np.testing.assert_array_equal(again[name], array)


def test_grafts_join_units_of_their_direction(pool):
    """A chunk is nearer to its unit than to most of the others."""
    stream = Stream(POLICY, pool)
    stream.prefill(700)
    for _ in range(400):
        stream.step()
    grown = LycheeIndex(POLICY.state.grow(0, stream.index.arrays, 2000, pool))
    old = stream.index
    grafted = set(
        range(
            old.num_chunks - (old.num_chunks - old.arrays["ranges"][0, old.num_units]),
            old.num_chunks,
        )
    )
    centres, _ = grown.boxes()
    for head in range(KV_HEADS):
        units, unit_of = centres[head, : grown.num_units], grown.units(head)
        units = units / np.linalg.norm(units, axis=1, keepdims=True)
        places = []
        for place, chunk in enumerate(grown.order()[head]):
            if chunk in grafted:
                products = units @ centres[head, grown.num_units + place]
                places.append((products > products[unit_of[place]]).sum())
        assert len(places) > 50
        # Units' boxes move with what joins them.
        assert np.mean(places) < 0.1 * grown.num_units


@pytest.mark.usefixtures("small_steps")
def test_a_search_ranks_no_more_however_long_the_generation(pool):
    stream = Stream(POLICY, pool)
    stream.prefill(250)
    for i in range(2400):
        stream.step()
        index = stream.index
        # Beyond those that it is to rank: of the last unit opened, and what came since the arrays
        # grew.
        of_unit = np.diff(index.arrays["ranges"]).max(axis=1)
        since = max(STEP, stream.kv_len / 8) + POLICY.max_chunk_tokens
        most = 1.5 * POLICY.ranked_chunks + of_unit + since / POLICY.min_chunk_tokens
        assert (ranked(index) <= most).all()
        if i % 400 == 399:
            check_index(stream)
    assert index.num_units > 1
    assert index.num_chunks > 5 * POLICY.ranked_chunks
    assert max(ranked(index)) < 0.5 * index.num_chunks


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("back", [1, 30, 300, 900])
def test_truncation_and_growing_again(back, pool):
    """What is left of the index stays; where chunks go it is what a fresh one of the text is."""
    stream = Stream(POLICY, pool)
    stream.prefill(700)
    for _ in range(700):
        stream.step()
    end, kv_len = stream.index.indexed_end, stream.kv_len - back
    assert stream.index.num_units > 1
    kept = deepcopy(stream.index.arrays)
    stream.store.truncate(stream.seq, kv_len)
    stream.attention.states.truncate(stream.seq, kv_len)
    stream.kv_len = kv_len
    if kv_len >= end:
        for name in ("rows", "scales", "ranges", "order", "blocks", "offsets"):
            np.testing.assert_array_equal(stream.index.arrays[name], kept[name])
    else:
        assert stream.attention.states.arrays_of(stream.seq) is None
        rebuilt = stream.attention.states.ensure(stream.seq, kv_len).layers[0]
        fresh = built_anew(stream)
        for name in INDEX:
            np.testing.assert_array_equal(rebuilt[name], fresh[name])
    for _ in range(300):
        stream.step()
        for tokens in stream.selection():
            assert (np.diff(tokens) > 0).all()
            assert len(tokens) == POLICY.budget_tokens
    check_index(stream)
    assert stream.index.num_units > 1


@pytest.mark.usefixtures("small_steps")
def test_a_saved_index_goes_on_as_it_would_have(pool):
    stream = Stream(POLICY, pool)
    stream.prefill(250)
    for _ in range(900):
        stream.step()
    assert stream.index.num_units > 1
    states, child = stream.attention.states, stream.store.fork(stream.seq)
    saved = states.save(stream.seq)
    saved.layers = {i: deepcopy(arrays) for i, arrays in saved.layers.items()}
    states.restore(child, saved)
    parent, state, kv_len = stream.seq, stream.rng.bit_generator.state, stream.kv_len
    found = []
    for seq in (parent, child):
        stream.seq, stream.kv_len, stream.rng.bit_generator.state = seq, kv_len, state
        for _ in range(400):  # the arrays grow in them
            stream.step()
        found.append((stream.selection(), deepcopy(stream.index.arrays)))
    for tokens, others in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(tokens, others)
    for name in INDEX:
        np.testing.assert_array_equal(found[0][1][name], found[1][1][name])


@pytest.mark.usefixtures("small_steps")
def test_a_step_that_fails_keeps_the_arrays_of_before(pool):
    stream = Stream(POLICY, pool)
    stream.prefill(700)
    states = stream.attention.states
    stream.step()
    state = states.arrays_of(stream.seq)
    while stream.kv_len < state.capacity_tokens:
        stream.step()
    kept = deepcopy(state.layers[0])
    states.begin([stream.seq], [1], prefill=False)
    grown = states.ensure(stream.seq, stream.kv_len + 1)
    placed = LycheeIndex(grown.layers[0])
    assert placed.arrays["ranges"][0, placed.num_units] == placed.num_chunks
    states.roll_back(stream.seq)
    state = states.arrays_of(stream.seq)
    for name in INDEX:
        np.testing.assert_array_equal(state.layers[0][name], kept[name])


def found_of_best(index: LycheeIndex, queries: np.ndarray, ranked_chunks: int) -> float:
    """Share of the eight best chunks of each query that are below the units that are opened."""
    centres, widths = index.boxes()
    found = []
    for head in range(KV_HEADS):
        spread = np.linalg.norm(queries[:, None] * widths[head], axis=2)
        ranks = queries @ centres[head].T + POLICY.spread_weight * spread
        of_units, of_chunks = np.split(ranks, [index.num_units], axis=1)
        unit_of = index.units(head)
        sizes = np.bincount(unit_of, minlength=index.num_units)
        for by_unit, by_chunk in zip(of_units, of_chunks, strict=True):
            order = np.argsort(-by_unit)
            opened = order[: np.searchsorted(np.cumsum(sizes[order]), ranked_chunks) + 1]
            found.append(np.isin(unit_of[np.argsort(-by_chunk)[:8]], opened).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("kv_len", [250, 1600], ids=["no units", "units"])
def test_placed_chunks_are_found_as_those_of_a_fresh_index(kv_len, pool):
    stream = Stream(POLICY, pool)
    stream.prefill(kv_len)
    for _ in range(3000 - kv_len):
        stream.step()
    placed = LycheeIndex(POLICY.state.grow(0, stream.index.arrays, 4000, pool))
    fresh = LycheeIndex(built_anew(stream))
    queries = stream.rng.standard_normal((60, placed.arrays["rows"].shape[2]))
    found, expected = (found_of_best(x, queries, POLICY.ranked_chunks) for x in (placed, fresh))
    assert expected > 0.5
    assert found > expected - 0.1
