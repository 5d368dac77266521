"""Chunks of LycheeCluster: sizes, the best delimiter, forced splits, and where they start."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cases.seeded import new_rng

from offload.policies.lychee_cluster.chunks import (
    BLOCK,
    MAX_CHUNK_TOKENS,
    chunk_length,
    chunk_start,
    cut_chunks,
    set_chunk_start,
)
from offload.selection.text_marks import cut_level, text_mark

WORD, SPACED, COMMA, STOP, LINE = (text_mark(text) for text in (b"a", b" a", b",", b".", b"\n"))


def marks_of(length: int, **at: int) -> np.ndarray:
    """`length` words without spaces, with other marks at t<position>."""
    marks = np.full(length, WORD, np.uint8)
    for name, mark in at.items():
        marks[int(name[1:])] = mark
    return marks


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (marks_of(40), 16),  # nothing to cut at
        (marks_of(40, t3=LINE), 16),  # too early
        (marks_of(40, t9=COMMA), 10),
        (marks_of(40, t9=LINE, t12=COMMA), 10),  # the better level
        (marks_of(40, t9=COMMA, t12=LINE), 13),
        (marks_of(40, t8=COMMA, t13=COMMA), 14),  # the last of equals
        (marks_of(40, t15=LINE), 16),
        (marks_of(40, t16=LINE), 16),  # too late
        (marks_of(40, t7=LINE), 8),
        (marks_of(40, t10=SPACED), 10),  # a space belongs to the word after it
        (marks_of(40, t10=STOP), 16),  # no sentence ends before a word
        (marks_of(40, t10=STOP, t11=SPACED), 11),
        (marks_of(40, t10=LINE, t11=LINE, t12=COMMA), 12),  # a paragraph
    ],
)
def test_chunk_length(marks, expected):
    assert chunk_length(marks, 0, len(marks), 8, 16) == expected
    shifted = np.concatenate([np.full(5, WORD, np.uint8), marks])
    assert chunk_length(shifted, 5, len(shifted), 8, 16) == expected


def test_without_marks_chunks_have_one_size():
    starts = cut_chunks(None, 16, 1000)
    assert list(np.diff(starts)) == [16] * 61
    assert starts[-1] == 992


@pytest.mark.parametrize("last", [16, 17, 31, 32, 33, 500])
def test_chunks_cover_what_they_can(last):
    marks = new_rng().choice([WORD, SPACED, COMMA, STOP, LINE], 600).astype(np.uint8)
    starts = cut_chunks(marks, 16, last)
    lengths = np.diff(starts)
    assert starts[0] == 16
    assert ((lengths >= 8) & (lengths <= 16)).all()
    assert last - 16 < starts[-1] <= last or starts[-1] == 16
    # The next chunk alone may not fit.
    assert last - starts[-1] < 16


def test_a_prefix_has_the_same_chunks():
    """What comes later does not change earlier cuts: streaming cuts as prefill does."""
    marks = new_rng().choice([WORD, SPACED, COMMA, STOP, LINE], 900).astype(np.uint8)
    whole = cut_chunks(marks, 4, 900)
    part = cut_chunks(marks[:500], 4, 460)
    assert list(part) == list(whole[: len(part)])


def test_cuts_are_at_the_best_level_in_reach():
    marks = new_rng().choice([WORD, SPACED, COMMA, STOP, LINE], 900).astype(np.uint8)
    starts = cut_chunks(marks, 0, 880)
    for start, end in pairwise(starts):
        reach = {n: cut_level(marks, start + n - 1, 900) or 9 for n in range(8, 17)}
        best = min(reach.values())
        expected = 16 if best == 9 else max(n for n, level in reach.items() if level == best)
        assert end - start == expected


def test_starts_are_kept_in_few_bytes():
    rng = new_rng()
    starts = 70000 + np.concatenate([[0], np.cumsum(rng.integers(1, MAX_CHUNK_TOKENS + 1, 300))])
    blocks, offsets = np.zeros(300 // BLOCK + 1, np.int32), np.zeros(301, np.uint8)
    for i, start in enumerate(starts):
        set_chunk_start(blocks, offsets, i, start)
    assert [chunk_start(blocks, offsets, i) for i in range(301)] == list(starts)
