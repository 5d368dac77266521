"""LFPS's bitmaps against sets: which candidates marks give, whatever the words and their ends."""

from __future__ import annotations

import numpy as np
import pytest
from cases.seeded import new_rng
from cases.slowly import combinations

from offload.policies.lfps import tables as tables
from offload.policies.lfps.layout import num_words, top_bit


def bitmap(words: int, positions: np.ndarray) -> np.ndarray:
    bits = np.zeros(words, np.uint64)
    for position in positions.tolist():
        bits[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
    return bits


@pytest.mark.parametrize(
    ("capacity", "share"), combinations([70, 128, 1000, 5000], [0.0, 0.01, 0.2, 1.0])
)
def test_expansion_and_listing(capacity, share):
    rng = new_rng()
    words, top = int(num_words(capacity)), int(top_bit(capacity))
    for _ in range(12):
        newest = int(rng.integers(capacity // 2, capacity))
        first = int(rng.integers(0, newest // 2))
        last = int(rng.integers(first, newest + 1))
        above_v = np.flatnonzero(rng.random(newest) < 0.3)
        above_s = np.flatnonzero(rng.random(newest) < 0.3)  # distances
        known_v, known_s = set(above_v.tolist()), set(above_s.tolist())
        indices = rng.permutation(newest).astype(np.int32)
        slots = np.flatnonzero(rng.random(newest) < share).astype(np.int32)
        spread = int(rng.choice([0, 1, 8, 62]))
        by_position = {int(indices[s]) for s in slots[::2]}
        marked = {newest - int(indices[s]) for s in slots[1::2]}
        marked = {token for token in marked if first <= token <= last} | {
            token + d for token in by_position if first <= token <= last for d in range(spread + 1)
        }
        expected = {
            token
            for i in marked
            for token in (i - 1, i, i + 1, i + 2)
            if first <= token < last
            and (token == i or token in known_v or newest - token in known_s)
        }
        marks = np.zeros(words, np.uint64)
        tables.mark_slots(slots[::2], indices, -1, spread, first, last, marks)
        tables.mark_slots(slots[1::2], indices, newest, 0, first, last, marks)
        chosen = rng.integers(0, 1 << 63, words).astype(np.uint64)
        n = tables.expand_marks(
            marks,
            bitmap(words, above_v),
            bitmap(words, top - above_s),
            top - newest,
            first,
            last,
            chosen,
        )
        assert not marks.any()
        room = np.full(len(expected) + 64, -1, np.int32)
        places = np.empty(words, np.int32)
        count = tables.list_tokens(chosen, n, first >> 6 << 6, places, room)
        assert room[:count].tolist() == sorted(expected)
        short = np.full(max(len(expected) // 2, 1), -1, np.int32)  # drops the first words
        count = tables.list_tokens(chosen, n, first >> 6 << 6, places, short)
        assert len(short) - 64 < count <= len(short) or count == len(expected)
        assert short[:count].tolist() == sorted(expected)[len(expected) - count :]


@pytest.mark.parametrize("by_distance", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_pruning(by_distance, share):
    """Scores at the mean or below it go back into the table, and no list, bit or place is left."""
    rng, capacity = new_rng(), 3000
    scores = rng.random(capacity).astype(np.float32)
    listed = [np.zeros(capacity, dtype) for dtype in (np.float32, np.int32)]
    top = int(top_bit(capacity)) if by_distance else -1
    bits, state = np.zeros(int(num_words(capacity)), np.uint64), np.zeros(tables.TABLE_STATE)
    table = tables.Table(scores.copy(), *listed, bits, top, state)
    tables.list_scores(table, 0.2)
    mean = 0.2 + 0.8 * share
    tables.prune(table, mean, np.zeros(capacity, np.int32))
    kept = np.flatnonzero(scores > mean)
    count = int(state[tables.COUNT])
    assert np.sort(table.indices[:count]).tolist() == kept.tolist()
    assert (table.values[:count] == scores[table.indices[:count]]).all()
    assert (table.scores[table.indices[:count]] == -np.arange(1, count + 1)).all()
    assert (bits == bitmap(len(bits), top - kept if by_distance else kept)).all()
    tables.unlist_scores(table)
    assert (table.scores == scores).all()


def test_the_smallest_float_above():
    """x > theta in float64 just where x >= it in float32."""
    for theta in (-1.0, 0.0, 1.0, 0.1, 1e-40, 3.0000001, np.float64(np.float32(0.1))):
        bound = np.float32(tables.float_above(theta))
        assert np.float64(bound) > theta
        assert np.float64(np.nextafter(bound, np.float32(-np.inf))) <= theta
    assert tables.float_above(np.inf) == np.inf
