"""What LFPS keeps of a layer, by the names of its arrays."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from offload.policies.lfps.tables import TABLE_STATE, Table, list_scores, take_back, unlist_scores
from offload.selection.callback import view_float32, view_int32, view_uint64
from offload.selection.layer_state import State
from offload.selection.layouts import NumberLayout, StateLayout, reader
from offload.system import huge_pages

_MIN_LISTED = 4096  # a list holds this many scores or a quarter of its table
LOCAL_TOKENS = 5  # of L, in a bypass
STATE = StateLayout(
    # [units, 2, …]: by position, by distance.
    tables=np.float32,  # [.., capacity] scores, or where they are listed
    values=np.float32,  # [.., listed] listed scores
    indices=np.int32,  # [.., listed] and their places in the tables
    bits=np.uint64,  # [.., words] what is listed
    marks=np.uint64,  # [units, words] scratch
    # [units, …]: two table states | scale | step | attempt | votes of the group's heads.
    units=np.float64,
    # The same before the last step, and of that step its kv_len and how many tokens it added.
    units_before=np.float64,
    added_tokens=np.int32,  # [units, added] of the last step
    added_to=np.float32,  # [units, 2, added] and their scores before, by position, by distance
    answers=np.float32,  # [units, 2 + sinks, head_dim]: mean key, mean value, sinks' values
    variance_ratios=np.float32,  # [units, group_size]
    bypass_scores=np.float32,  # [units, group_size * (sinks + LOCAL_TOKENS)] scratch
    candidates=np.int32,  # [units, longest]
    num_candidates=np.int32,  # [units]
    hits=np.int32,  # [units, listed] scratch
    sizes=np.int32,  # SIZES
)
NUMBERS = NumberLayout(
    "alpha",
    "gamma",
    "bypass_threshold",
    "spread",
    "prune_every",
    "raise_every",
    "candidates_per_budget",
)
SIZES = ("capacity", "listed", "longest", "added")
read_state, read_numbers, read_sizes = STATE.read, NUMBERS.read, reader(SIZES, np.int32)
# Of `units`; LAST_KV_LEN and LAST_ADDED are the last of `units_before`.
SCALE, STEP, ATTEMPT, VOTES = (2 * TABLE_STATE + i for i in range(4))
LAST_KV_LEN, LAST_ADDED = -2, -1


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
    return listed, min(capacity, max(_MIN_LISTED, capacity // 2, 3 * budget_tokens))


def unit_bytes(
    capacity: int, group_size: int, budget_tokens: int, sink_tokens: int, head_dim: int
) -> int:
    """Bytes of all arrays of a unit."""
    listed, longest = _list_lengths(capacity, budget_tokens)
    numbers = 2 * capacity + 4 * listed + longest + listed + 3 * budget_tokens + 1
    numbers += (2 + sink_tokens) * head_dim + group_size * (1 + sink_tokens + LOCAL_TOKENS)
    return 4 * numbers + 8 * (3 * int(num_words(capacity)) + 2 * (VOTES + group_size) + 2)


def make_arrays(
    tables: npt.NDArray[np.float32],
    answers: npt.NDArray[np.float32],
    variance_ratios: npt.NDArray[np.float32],
    num_tokens: int,
    budget_tokens: int,
    units_of_before: npt.NDArray[np.float64] | None = None,
) -> State:
    """All arrays, for tables that hold scores only.

    Args:
        num_tokens: in the tables, so without sinks.
        units_of_before: `units`, where the tables are older.
    """
    num_units, _, capacity = tables.shape
    listed, longest = _list_lengths(capacity, budget_tokens)
    words = int(num_words(capacity))
    group_size, num_sinks = variance_ratios.shape[1], answers.shape[1] - 2
    units = np.zeros((num_units, VOTES + group_size), np.float64)
    units[:, SCALE] = 1.0 if units_of_before is None else units_of_before[:, SCALE]
    units[:, ATTEMPT] = 0.0 if units_of_before is None else units_of_before[:, ATTEMPT]
    units[:, STEP] = np.inf  # prune before the first prediction
    units[:, VOTES:] = 1.0
    scores = group_size * (num_sinks + LOCAL_TOKENS)
    arrays: State = {
        "tables": tables,
        "units": units,
        "units_before": np.zeros((num_units, units.shape[1] + 2), np.float64),
        "added_tokens": np.zeros((num_units, budget_tokens), np.int32),
        "added_to": np.zeros((num_units, 2, budget_tokens), np.float32),
        "answers": answers,
        "variance_ratios": variance_ratios,
        "bypass_scores": np.zeros((num_units, scores), np.float32),
        "num_candidates": np.zeros(num_units, np.int32),
        "sizes": np.array([capacity, listed, longest, budget_tokens], np.int32),
        **_side_by_side(
            bits=((num_units, 2, words), np.uint64),
            marks=((num_units, words), np.uint64),
            values=((num_units, 2, listed), np.float32),
            indices=((num_units, 2, listed), np.int32),
            candidates=((num_units, longest), np.int32),
            hits=((num_units, listed), np.int32),
        ),
    }
    list_all(arrays, num_tokens)
    return arrays


def _side_by_side(**arrays: tuple[tuple[int, ...], npt.DTypeLike]) -> State:
    """Zeroed arrays of these shapes and dtypes, the widest items first, in one piece of memory.

    Together they are large enough for huge pages: a prediction reads a few KiB at many places, and
    waits for the address of each where pages are small.
    """
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays.values()]
    pieces = np.split(huge_pages.zeros((sum(sizes),), np.uint8), np.cumsum(sizes)[:-1])
    return {
        name: piece.view(dtype).reshape(shape)
        for piece, (name, (shape, dtype)) in zip(pieces, arrays.items(), strict=True)
    }


def list_all(arrays: State, num_tokens: int) -> None:
    """Make lists, bits and sums of tables that hold scores only; `num_tokens`: without sinks."""
    for unit in range(len(arrays["tables"])):
        for table in _tables_of(arrays, unit):
            list_scores(table, float(table.scores.sum(dtype=np.float64)) / num_tokens)


def forget_step(arrays: State) -> None:
    """There is no last step to take back."""
    arrays["units_before"][:, LAST_KV_LEN:] = 0.0


def take_back_step(arrays: State, kv_len: int) -> None:
    """Scores, lists and state as before the last step, if it came after `kv_len` tokens.

    What `prepare` did before its prediction stays: done again, it changes nothing.
    """
    units_before = arrays["units_before"]
    for unit in np.flatnonzero(units_before[:, LAST_KV_LEN] > kv_len):
        before = units_before[unit, :LAST_KV_LEN]
        newest, num = (int(x) for x in units_before[unit, LAST_KV_LEN:])
        tokens = arrays["added_tokens"][unit, :num]
        for k, table in enumerate(_tables_of(arrays, int(unit))):
            of_table = before[k * TABLE_STATE : (k + 1) * TABLE_STATE]
            take_back(table, of_table, tokens, arrays["added_to"][unit, k, :num], newest - 1)
        arrays["units"][unit] = before
    forget_step(arrays)


def unlist_all(arrays: State) -> None:
    """Tables that hold scores only."""
    for unit in range(len(arrays["tables"])):
        for table in _tables_of(arrays, unit):
            unlist_scores(table)


def _tables_of(arrays: State, unit: int) -> list[Table]:
    """By position, by distance."""
    tops = -1, int(top_bit(arrays["tables"].shape[2]))
    states = arrays["units"][unit, : 2 * TABLE_STATE].reshape(2, TABLE_STATE)
    scores, values, indices, bits = (
        arrays[name][unit] for name in ("tables", "values", "indices", "bits")
    )
    return [Table(scores[k], values[k], indices[k], bits[k], tops[k], states[k]) for k in range(2)]


@numba.njit(inline="always")
def table_of(state: Any, sizes: Any, unit: Any, of_unit: Any, k: Any) -> Any:
    """`_tables_of`, for callbacks; `of_unit`: the unit's row of `units`."""
    row = 2 * unit + k
    return Table(
        view_float32(state.tables, sizes.capacity, row),
        view_float32(state.values, sizes.listed, row),
        view_int32(state.indices, sizes.listed, row),
        view_uint64(state.bits, num_words(sizes.capacity), row),
        -1 if k == 0 else top_bit(sizes.capacity),
        of_unit[k * TABLE_STATE : (k + 1) * TABLE_STATE],
    )
