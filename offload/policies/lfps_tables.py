"""The score tables of LFPS and what makes a step on them cost O(candidates).

A table is float32 [capacity] of scores by position (vertical) or by distance to the newest token
(slash). Decay is lazy: stored = score / gamma^steps, so stored scores only grow, and with them the
maximum and, but for rounding, the mean. Power sums S1 … S4 (float64) follow every change, so that

    theta = mean + alpha * max / sqrt(kurtosis)

is O(1); it scales with the table, so stored units do. Scores above a floor, the mean at the last
pruning, are *listed*: their values live in a dense list beside their indices, and the table holds
-(slot + 1) in their place, so that an update touches one line of the table and a prediction streams
the list only. `bits` marks what is listed: the neighbours that an expansion may add are found
there, 64 at a time. The slash table's bits are reversed (bit `top` - distance), so that a shift
lines them up with positions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

# Of a table's float64 state: power sums, then these.
MAX, FLOOR, COUNT, FULL = 4, 5, 6, 7
TABLE_STATE = 8
_VANISHED = np.float32(1e-30)  # of the largest stored score's scale, 1; smaller ones become 0

_ZERO, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)
_62, _63, _64 = np.uint64(62), np.uint64(63), np.uint64(64)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@intrinsic
def _trailing_zeros(typingctx: Any, word: Any) -> Any:
    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ctx.get_constant(types.boolean, True))

    return types.int64(types.uint64), codegen


@numba.njit(inline="always")
def _set_bit(bits: Any, index: Any) -> None:
    bits[index >> 6] |= _ONE << np.uint64(index & 63)


@numba.njit(inline="always")
def _clear_bit(bits: Any, index: Any) -> None:
    bits[index >> 6] &= ~(_ONE << np.uint64(index & 63))


@numba.njit(inline="always")
def _bit_of(index: Any, top: Any) -> Any:
    return top - index if top >= 0 else index


@numba.njit(cache=True)
def mean_of(state: Any, n: Any) -> Any:
    """Mean of a table of n scores, zeros included."""
    return state[0] / n


@numba.njit(cache=True)
def threshold_of(state: Any, n: Any, alpha: Any) -> Any:
    """theta = mean + alpha * max / sqrt(kurtosis) of n scores; infinite if all are equal."""
    mean = state[0] / n
    square = state[1] / n
    variance = square - mean * mean
    fourth = (
        state[3] / n
        - 4.0 * mean * state[2] / n
        + 6.0 * mean * mean * square
        - 3.0 * mean * mean * mean * mean
    )
    if variance <= 1e-9 * square or fourth <= 0.0:
        return np.inf
    return mean + alpha * state[MAX] * variance / np.sqrt(fourth)


@numba.njit(cache=True)
def lowered_threshold(theta: Any, mean: Any, share: Any) -> Any:
    """The threshold at a share of its height above the mean; -1, below every score, for 0."""
    return mean + share * (theta - mean) if share > 0.0 else -1.0


@numba.njit(cache=True)
def list_scores(
    table: Any, values: Any, indices: Any, bits: Any, top: Any, state: Any, floor: Any
) -> None:
    """Sums, maximum, list and bits of a table that holds scores only."""
    s1 = s2 = s3 = s4 = highest = 0.0
    for i in range(len(table)):
        x = np.float64(table[i])
        s1 += x
        s2 += x * x
        s3 += x * x * x
        s4 += x * x * x * x
        highest = max(highest, x)
    state[0], state[1], state[2], state[3], state[MAX] = s1, s2, s3, s4, highest
    state[FLOOR], state[FULL] = floor, 0.0
    bits[:] = _ZERO
    count = 0
    for i in range(len(table)):
        if table[i] > floor:
            if count == len(values):
                state[FULL] = 1.0
                break
            values[count] = table[i]
            indices[count] = i
            table[i] = -np.float32(count + 1)
            _set_bit(bits, _bit_of(i, top))
            count += 1
    state[COUNT] = count


@numba.njit(cache=True)
def unlist_scores(table: Any, values: Any, indices: Any, state: Any) -> None:
    """The list's scores back into the table; `list_scores` has to follow."""
    for slot in range(np.int64(state[COUNT])):
        table[indices[slot]] = values[slot]
    state[COUNT] = 0


@numba.njit(cache=True)
def prune(
    table: Any, values: Any, indices: Any, bits: Any, top: Any, state: Any, mean: Any
) -> None:
    """Unlist what the mean has overtaken; a full list gives up the lower part of it as well."""
    count = np.int64(state[COUNT])
    floor = max(state[FLOOR], mean)
    if state[FULL] > 0.0 and count > 0:
        total = 0.0
        for slot in range(count):
            total += values[slot]
        floor = max(floor, total / count)
    slot = 0
    while slot < count:
        if values[slot] > floor:
            slot += 1
            continue
        index = indices[slot]
        table[index] = values[slot]
        _clear_bit(bits, _bit_of(index, top))
        count -= 1
        if slot < count:
            values[slot] = values[count]
            indices[slot] = indices[count]
            table[indices[slot]] = -np.float32(slot + 1)
    state[FLOOR], state[COUNT], state[FULL] = floor, count, 0.0


@numba.njit(cache=True)
def add_scores(
    table: Any,
    values: Any,
    indices: Any,
    bits: Any,
    top: Any,
    state: Any,
    tokens: Any,
    weights: Any,
    newest: Any,
    scale: Any,
) -> None:
    """Stored score of each token += its weight * scale; by distance to `newest` if top >= 0."""
    s1, s2, s3, s4 = state[0], state[1], state[2], state[3]
    highest, floor = state[MAX], state[FLOOR]
    count = np.int64(state[COUNT])
    for i in range(len(tokens)):
        index = newest - tokens[i] if top >= 0 else np.int64(tokens[i])
        before = table[index]
        slot = -1
        if before < 0.0:
            slot = np.int64(-before) - 1
            before = values[slot]
        after = np.float32(before + weights[i] * scale)
        if slot >= 0:
            values[slot] = after
        elif after > floor and count < len(values):
            values[count] = after
            indices[count] = index
            count += 1
            table[index] = -np.float32(count)
            _set_bit(bits, _bit_of(index, top))
        else:
            table[index] = after
        x, y = np.float64(after), np.float64(before)
        s1 += x - y
        s2 += x * x - y * y
        s3 += x * x * x - y * y * y
        s4 += x * x * x * x - y * y * y * y
        highest = max(highest, x)
    state[0], state[1], state[2], state[3] = s1, s2, s3, s4
    state[MAX], state[COUNT] = highest, count
    if count == len(values):
        state[FULL] = 1.0


@numba.njit(cache=True)
def rescale(table: Any, values: Any, state: Any, factor: Any) -> None:
    """Multiply all stored scores: the one pass over a table, once in hundreds of steps."""
    f = np.float32(factor)
    for i in range(len(table)):
        x = table[i]
        if x > 0.0:
            x *= f
            table[i] = x if x > _VANISHED else np.float32(0.0)
    for slot in range(np.int64(state[COUNT])):
        values[slot] *= f
    power = factor
    for k in range(4):
        state[k] *= power
        power *= factor
    state[MAX] *= factor
    state[FLOOR] *= factor


@numba.njit(cache=True)
def mark_above(
    values: Any,
    indices: Any,
    state: Any,
    theta: Any,
    newest: Any,
    first: Any,
    hits: Any,
    marks: Any,
    touched: Any,
) -> Any:
    """Mark the token of every listed score above theta.

    Args:
        newest: the newest token, from which the slash table's distances count; -1: vertical.
        hits: int32 scratch as long as the list.
        marks: uint64 bitmap over tokens, touched: uint64 bitmap over the words of `marks` that an
            expansion of the marked tokens may reach.

    Returns:
        how many tokens from `first` on were marked.
    """
    count = 0
    for slot in range(np.int64(state[COUNT])):
        hits[count] = indices[slot]
        count += np.int64(values[slot] > theta)
    marked = 0
    for i in range(count):
        token = newest - hits[i] if newest >= 0 else np.int64(hits[i])
        if token < first:
            continue
        marked += 1
        _set_bit(marks, token)
        _set_bit(touched, max(token - 1, 0) >> 6)
        _set_bit(touched, (token + 2) >> 6)
    return marked


@numba.njit(cache=True)
def mark_tokens(begin: Any, end: Any, marks: Any, touched: Any) -> None:
    """Mark the tokens [begin, end)."""
    for token in range(begin, end):
        _set_bit(marks, token)
        _set_bit(touched, max(token - 1, 0) >> 6)
        _set_bit(touched, (token + 2) >> 6)


@numba.njit(cache=True)
def take_candidates(
    marks: Any,
    touched: Any,
    vertical: Any,
    slash: Any,
    shift: Any,
    first: Any,
    last: Any,
    candidates: Any,
) -> Any:
    """Expand the marked tokens by {-1, 1, 2}, list them in [first, last) and clear the marks.

    A token that an expansion adds must be above the mean of a table, that is, listed there.

    Args:
        vertical: bits of the vertical table; slash: of the slash table, whose bit token + shift
            belongs to a token.
        candidates: int32, receives ascending tokens; the last ones are dropped if it is short.

    Returns:
        how many.
    """
    count = 0
    for block in range(len(touched)):
        words = touched[block]
        while words != _ZERO:
            word = block * 64 + _trailing_zeros(words)  # type: ignore[call-arg]
            words &= words - _ONE
            if word * 64 >= last:
                break
            here, above = marks[word], marks[word + 1]
            below = marks[word - 1] if word > 0 else _ZERO
            near = (
                ((here << _ONE) | (below >> _63))
                | ((here << _TWO) | (below >> _62))
                | ((here >> _ONE) | (above << _63))
            )
            bit = word * 64 + shift
            part = np.uint64(bit & 63)
            listed = slash[bit >> 6] >> part
            if part != _ZERO:
                listed |= slash[(bit >> 6) + 1] << (_64 - part)
            chosen = here | (near & (listed | vertical[word]))
            if word * 64 < first:
                below_first = first - word * 64
                if below_first >= 64:
                    continue
                chosen &= _ALL << np.uint64(below_first)
            if last - word * 64 < 64:
                chosen &= (_ONE << np.uint64(last - word * 64)) - _ONE
            while chosen != _ZERO:
                if count < len(candidates):
                    candidates[count] = word * 64 + _trailing_zeros(chosen)
                    count += 1
                chosen &= chosen - _ONE
    for block in range(len(touched)):
        words = touched[block]
        touched[block] = _ZERO
        while words != _ZERO:
            marks[block * 64 + _trailing_zeros(words)] = _ZERO  # type: ignore[call-arg]
            words &= words - _ONE
    return count
