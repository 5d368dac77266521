"""Where LFPS keeps what in a policy's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from offload.policies.lfps.tables import TABLE_STATE, list_scores, take_back, unlist_scores

_MIN_LISTED = 4096  # a list holds this many scores or a quarter of its table
# Arrays, 0 to 6 with a row per unit: 0 tables float32 [2, capacity]; 1 listed values float32 and
# 2 their indices int32 [2, listed]; 3 bitmaps uint64 [vertical | slash | marks]; 4 state
# float64 [two table states | scale | step | attempt | votes of the group's heads], then the same
# as it was before the last step, and of that step its kv_len and how many tokens it added; 5 what
# bypasses need, float32 [mean key | mean value | sink values | variance ratios | scores]; 6 int32
# [candidates | hits], which are scratch, and of the last step [tokens | their scores before, by
# position | by distance]; 7 int32 [capacity, listed, longest list of candidates, most tokens of a
# step | candidates of units].
SCALE, STEP, ATTEMPT, VOTES = (2 * TABLE_STATE + i for i in range(4))
CAPACITY, LISTED, CANDIDATES, ADDED, FIRST_COUNT = 0, 1, 2, 3, 4


@numba.njit(inline="always")
def unit_floats(group_size: Any) -> Any:
    """Numbers of a unit in array 4."""
    return 2 * (VOTES + group_size) + 2


@numba.njit(inline="always")
def room_of_unit(sizes: Any) -> Any:
    """Numbers of a unit in array 6."""
    return sizes[CANDIDATES] + sizes[LISTED] + 3 * sizes[ADDED]


def group_size_of(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """Query heads of a unit."""
    return int(arrays[4].shape[1] - 2) // 2 - VOTES


@numba.njit(inline="always")
def num_words(capacity: Any) -> Any:
    """Words of a bitmap over tokens and what an expansion may reach beyond them."""
    return (capacity + 2) // 64 + 2


@numba.njit(inline="always")
def top_bit(capacity: Any) -> Any:
    """The slash table's bit of distance 0."""
    return 64 * (num_words(capacity) - 1) - 1


def _list_lengths(capacity: int, budget_tokens: int) -> tuple[int, int]:
    """Scores that a list holds, and candidates."""
    listed = min(capacity, max(_MIN_LISTED, capacity // 4))
    return listed, min(capacity, max(_MIN_LISTED, capacity // 2, budget_tokens))


def unit_bytes(capacity: int, group_size: int, budget_tokens: int) -> int:
    """Of all arrays of a unit but what bypasses need."""
    listed, longest = _list_lengths(capacity, budget_tokens)
    words, floats = int(num_words(capacity)), int(unit_floats(group_size))
    numbers = 2 * capacity + 4 * listed + longest + listed + 3 * budget_tokens + 1
    return 4 * numbers + 8 * (3 * words + floats)


def make_arrays(
    tables: npt.NDArray[np.float32],
    bypass: npt.NDArray[np.float32],
    group_size: int,
    num_tokens: int,
    budget_tokens: int,
    unit_states: npt.NDArray[np.float64] | None = None,
) -> list[npt.NDArray[Any]]:
    """All arrays, for tables that hold scores only.

    Args:
        bypass: array 5; num_tokens: in the tables, so without sinks.
        unit_states: array 4 of before, where the tables are older.
    """
    num_units, _, capacity = tables.shape
    listed, longest = _list_lengths(capacity, budget_tokens)
    words = int(num_words(capacity))
    states = np.zeros((num_units, int(unit_floats(group_size))), np.float64)
    states[:, SCALE] = 1.0 if unit_states is None else unit_states[:, SCALE]
    states[:, ATTEMPT] = 0.0 if unit_states is None else unit_states[:, ATTEMPT]
    states[:, STEP] = np.inf  # prune before the first prediction
    states[:, VOTES : VOTES + group_size] = 1.0
    arrays: list[npt.NDArray[Any]] = [
        tables,
        np.zeros((num_units, 2, listed), np.float32),
        np.zeros((num_units, 2, listed), np.int32),
        np.zeros((num_units, 3 * words), np.uint64),
        states,
        bypass,
        np.zeros((num_units, longest + listed + 3 * budget_tokens), np.int32),
        np.array([capacity, listed, longest, budget_tokens] + [0] * num_units, np.int32),
    ]
    list_all(arrays, num_tokens)
    return arrays


def list_all(arrays: Sequence[npt.NDArray[Any]], num_tokens: int) -> None:
    """Make lists, bits and sums of tables that hold scores only; `num_tokens`: without sinks."""
    tables, values, indices, bitmaps, states = arrays[:5]
    capacity = tables.shape[2]
    words = int(num_words(capacity))
    for unit in range(len(tables)):
        for k in range(2):
            list_scores(
                tables[unit, k],
                values[unit, k],
                indices[unit, k],
                bitmaps[unit, k * words : (k + 1) * words],
                -1 if k == 0 else int(top_bit(capacity)),
                states[unit, k * TABLE_STATE : (k + 1) * TABLE_STATE],
                float(tables[unit, k].sum(dtype=np.float64)) / num_tokens,
            )


def forget_step(arrays: Sequence[npt.NDArray[Any]]) -> None:
    """There is no last step to take back."""
    arrays[4][:, -2:] = 0.0


def take_back_step(arrays: Sequence[npt.NDArray[Any]], kv_len: int) -> None:
    """Scores, lists and state as before the last step, if it came after `kv_len` tokens.

    What `prepare` did before its prediction stays: done again, it changes nothing.
    """
    tables, values, _, bitmaps, states, _, scratch, sizes = arrays
    size = states.shape[1] // 2 - 1
    words, first = int(num_words(tables.shape[2])), int(sizes[CANDIDATES] + sizes[LISTED])
    for unit in np.flatnonzero(states[:, -2] > kv_len):
        newest, num = (int(x) for x in states[unit, -2:])
        newest -= 1
        tokens, *scores = scratch[unit, first:].reshape(3, -1)[:, :num]
        before = states[unit, size : 2 * size]
        for k in range(2):
            take_back(
                tables[unit, k],
                values[unit, k],
                bitmaps[unit, k * words : (k + 1) * words],
                -1 if k == 0 else int(top_bit(tables.shape[2])),
                before[k * TABLE_STATE : (k + 1) * TABLE_STATE],
                tokens,
                scores[k].view(np.float32),
                newest,
            )
        states[unit, :size] = before
    forget_step(arrays)


def unlist_all(arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Tables that hold scores only."""
    tables, values, indices, _, states = arrays[:5]
    for unit in range(len(tables)):
        for k in range(2):
            unlist_scores(
                tables[unit, k],
                values[unit, k],
                indices[unit, k],
                states[unit, k * TABLE_STATE : (k + 1) * TABLE_STATE],
            )
