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

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

from offload.selection.callback import prefetch_line_to_write, view_float32
from offload.selection.compiled import cached_njit

# Of a table's float64 state: power sums, then these.
MAX, FLOOR, COUNT, FULL = 4, 5, 6, 7
TABLE_STATE = 8
_VANISHED = np.float32(1e-30)  # of the largest stored score's scale, 1; smaller ones become 0

_AHEAD = 32  # tokens whose places in the table are fetched before they are needed
_VALUES_AHEAD = 12  # and whose scores in the list are

_ZERO, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)
_62, _63, _64 = np.uint64(62), np.uint64(63), np.uint64(64)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Table(NamedTuple):
    """One table, by position or by distance.

    Attributes:
        scores: float32 [capacity] scores, or where they are listed.
        values, indices: float32 and int32 [listed], listed scores and their places.
        bits: uint64 [words], what is listed.
        top: the bit of distance 0; -1: by position.
        state: float64 [TABLE_STATE].
    """

    scores: Any
    values: Any
    indices: Any
    bits: Any
    top: Any
    state: Any


@intrinsic
def _bits_set(typingctx: Any, word: Any) -> Any:
    def codegen(ctx: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

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


@cached_njit()
def mean_of(state: Any, n: Any) -> Any:
    """Mean of a table of n scores, zeros included."""
    return state[0] / n


@cached_njit()
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


@cached_njit()
def lowered_threshold(theta: Any, mean: Any, share: Any) -> Any:
    """The threshold at a share of its height above the mean; -1, below every score, for 0."""
    return mean + share * (theta - mean) if share > 0.0 else -1.0


@cached_njit()
def list_scores(table: Table, floor: Any) -> None:
    """Sums, maximum, list and bits of one that holds scores only."""
    scores, values, indices, bits, top, state = table
    s1 = s2 = s3 = s4 = highest = 0.0
    for i in range(len(scores)):
        x = np.float64(scores[i])
        s1 += x
        s2 += x * x
        s3 += x * x * x
        s4 += x * x * x * x
        highest = max(highest, x)
    state[0], state[1], state[2], state[3], state[MAX] = s1, s2, s3, s4, highest
    state[FLOOR], state[FULL] = floor, 0.0
    bits[:] = _ZERO
    count = 0
    for i in range(len(scores)):
        if scores[i] > floor:
            if count == len(values):
                state[FULL] = 1.0
                break
            values[count] = scores[i]
            indices[count] = i
            scores[i] = -np.float32(count + 1)
            _set_bit(bits, _bit_of(i, top))
            count += 1
    state[COUNT] = count


@cached_njit()
def unlist_scores(table: Table) -> None:
    """The list's scores back into the table; `list_scores` has to follow."""
    for slot in range(np.int64(table.state[COUNT])):
        table.scores[table.indices[slot]] = table.values[slot]
    table.state[COUNT] = 0


@cached_njit()
def prune(table: Table, mean: Any, slots: Any) -> None:
    """Unlist what the mean has overtaken; a full list gives up the lower part of it as well.

    Args:
        slots: int32 [listed] scratch.
    """
    scores, values, indices, bits, top, state = table
    count = np.int64(state[COUNT])
    floor = max(state[FLOOR], mean)
    if state[FULL] > 0.0 and count > 0:
        total = 0.0
        for slot in range(count):
            total += values[slot]
        floor = max(floor, total / count)
    num = 0
    for slot in range(count):  # without a branch, which could not be predicted
        slots[num] = slot
        num += not values[slot] > floor
    for k in range(num - 1, -1, -1):  # from the end: what takes a place was above the floor
        slot = np.int64(slots[k])
        index = indices[slot]
        scores[index] = values[slot]
        _clear_bit(bits, _bit_of(index, top))
        count -= 1
        if slot < count:
            values[slot] = values[count]
            indices[slot] = indices[count]
            scores[indices[slot]] = -np.float32(slot + 1)
    state[FLOOR], state[COUNT], state[FULL] = floor, count, 0.0


@cached_njit(fastmath={"reassoc"})
def _added_to_sums(old: Any, weights: Any, scale: Any) -> Any:
    """What power sums gain when `add_scores` adds to these; side by side, which has no order."""
    s1 = s2 = s3 = s4 = 0.0
    for i in range(len(old)):
        before = old[i]
        after = np.float32(before + weights[i] * scale)
        x, y = np.float64(after), np.float64(before)
        x2, y2 = x * x, y * y
        s1 += x - y
        s2 += x2 - y2
        s3 += x2 * x - y2 * y
        s4 += x2 * x2 - y2 * y2
    return s1, s2, s3, s4


@cached_njit()
def add_scores(table: Table, tokens: Any, weights: Any, newest: Any, scale: Any, old: Any) -> None:
    """Stored score of each token += its weight * scale; by distance to `newest` if top >= 0.

    `old` receives the scores before, for `take_back`.
    """
    scores, values, indices, bits, top, state = table
    highest, floor = state[MAX], state[FLOOR]
    count, num = np.int64(state[COUNT]), len(tokens)
    # Signed: Numba adds unsigned and signed integers as floats.
    scores_at, values_at = np.int64(scores.ctypes.data), np.int64(values.ctypes.data)
    first_at, stride = (scores_at + 4 * newest, -4) if top >= 0 else (scores_at, 4)
    # A score is behind two cache misses, its place in the table and the list.
    for i in range(min(_AHEAD, num)):
        prefetch_line_to_write(first_at + stride * np.int64(tokens[i]))
    for i in range(num):
        ahead = np.int64(tokens[min(i + _AHEAD, num - 1)])
        prefetch_line_to_write(first_at + stride * ahead)
        ahead = np.int64(tokens[min(i + _VALUES_AHEAD, num - 1)])
        place = view_float32(first_at + stride * ahead, 1)[0]
        prefetch_line_to_write(values_at + 4 * max(np.int64(-place) - 1, 0))
        place_at = first_at + stride * np.int64(tokens[i])
        place = view_float32(place_at, 1)[0]
        # One address: whether a score is listed cannot be predicted.
        at = values_at + 4 * (np.int64(-place) - 1) if place < 0.0 else place_at
        score = view_float32(at, 1)
        before = score[0]
        old[i] = before
        after = np.float32(before + weights[i] * scale)
        score[0] = after
        highest = max(highest, np.float64(after))
        if (place >= 0.0) & (after > floor) and count < len(values):  # one branch, seldom taken
            index = (place_at - scores_at) >> 2
            values[count] = after
            indices[count] = index
            count += 1
            scores[index] = -np.float32(count)
            _set_bit(bits, _bit_of(index, top))
    s1, s2, s3, s4 = _added_to_sums(old[:num], weights[:num], scale)
    state[0] += s1
    state[1] += s2
    state[2] += s3
    state[3] += s4
    state[MAX], state[COUNT] = highest, count
    if count == len(values):
        state[FULL] = 1.0


@cached_njit()
def take_back(table: Table, before: Any, tokens: Any, old: Any, newest: Any) -> None:
    """Undo `add_scores`; `before`: its state as it was."""
    scores, values, _, bits, top, _ = table
    count = np.int64(before[COUNT])
    for i in range(len(tokens)):
        index = newest - tokens[i] if top >= 0 else np.int64(tokens[i])
        place = scores[index]
        if place >= 0.0:
            scores[index] = old[i]
        elif np.int64(-place) - 1 < count:
            values[np.int64(-place) - 1] = old[i]
        else:  # it was listed then
            scores[index] = old[i]
            _clear_bit(bits, _bit_of(index, top))


@cached_njit()
def rescale(table: Table, factor: Any) -> None:
    """Multiply all stored scores: the one pass over a table, once in hundreds of steps."""
    scores, values, state = table.scores, table.values, table.state
    f = np.float32(factor)
    for i in range(len(scores)):
        x = scores[i]
        if x > 0.0:
            x *= f
            scores[i] = x if x > _VANISHED else np.float32(0.0)
    for slot in range(np.int64(state[COUNT])):
        values[slot] *= f
    power = factor
    for k in range(4):
        state[k] *= power
        power *= factor
    state[MAX] *= factor
    state[FLOOR] *= factor


@numba.njit(inline="always")
def float_above(theta: Any) -> Any:
    """The smallest float32 above theta: x > theta just where x >= it."""
    nearest = np.float32(theta)
    return nearest if nearest > theta else np.nextafter(nearest, np.float32(np.inf))


@cached_njit()
def mark_slots(
    slots: Any, indices: Any, newest: Any, spread: Any, first: Any, last: Any, marks: Any
) -> Any:
    """Mark the tokens of some slots of a list, and `spread` tokens after each.

    Args:
        newest: the newest token, from which the slash table's distances count; -1: vertical.
        spread: 0 to 62.
        marks: uint64 bitmap over tokens. Those outside of [first, last] are left out: they are no
            candidates, and none of their neighbours that an expansion adds is.

    Returns:
        how many were marked.
    """
    marked = 0
    run = (_TWO << np.uint64(spread)) - _ONE
    for i in range(len(slots)):
        index = np.int64(indices[slots[i]])
        token = newest - index if newest >= 0 else index
        if first <= token <= last:
            marked += 1
            word, bit = token >> 6, np.uint64(token & 63)
            marks[word] |= run << bit
            marks[word + 1] |= (run >> _ONE) >> (_63 - bit)
    return marked


@cached_njit()
def mark_tokens(begin: Any, end: Any, marks: Any) -> None:
    """Mark the tokens [begin, end)."""
    for token in range(begin, end):
        _set_bit(marks, token)


@numba.njit(inline="always")
def _expanded(here: Any, below: Any, above: Any, listed: Any) -> Any:
    """Bits of a word of marks, and those at -1, 1 and 2 of marks that are listed."""
    near = (
        (here << _ONE)
        | (below >> _63)
        | (here << _TWO)
        | (below >> _62)
        | (here >> _ONE)
        | (above << _63)
    )
    return here | (near & listed)


@cached_njit()
def expand_marks(
    marks: Any, vertical: Any, slash: Any, shift: Any, first: Any, last: Any, chosen: Any
) -> Any:
    """Expand marked tokens in [first, last] by {-1, 1, 2} and clear the marks.

    A token that an expansion adds must be above the mean of a table, that is, listed there.

    Args:
        vertical: bits of the vertical table; slash: of the slash table, whose bit token + shift
            belongs to a token.
        chosen: uint64, receives the bits of tokens in [first, last), beginning with the word of
            `first`.

    Returns:
        how many words.
    """
    begin, n = first >> 6, ((last + 63) >> 6) - (first >> 6)
    if n <= 0:
        return 0
    part, ahead = np.uint64(shift & 63), begin + (shift >> 6)
    rest = _63 - part  # a shift by 64 - part in two steps: part may be 0
    # All words, empty or not, in one loop over vectors.
    low, high = slash[ahead : ahead + n], slash[ahead + 1 : ahead + 1 + n]
    of_table = vertical[begin : begin + n]
    listed = of_table[0] | (low[0] >> part) | ((high[0] << _ONE) << rest)
    chosen[0] = _expanded(marks[begin], _ZERO, marks[begin + 1], listed)
    here, below = marks[begin + 1 : begin + n], marks[begin : begin + n - 1]
    above, out = marks[begin + 2 : begin + n + 1], chosen[1:n]
    of_table, low, high = of_table[1:], low[1:], high[1:]
    for i in range(n - 1):
        listed = of_table[i] | (low[i] >> part) | ((high[i] << _ONE) << rest)
        out[i] = _expanded(here[i], below[i], above[i], listed)
    chosen[0] &= _ALL << np.uint64(first & 63)
    if last & 63 != 0:
        chosen[n - 1] &= (_ONE << np.uint64(last & 63)) - _ONE
    marks[begin : begin + n + 1] = _ZERO
    return n


@cached_njit()
def list_tokens(chosen: Any, n: Any, base: Any, places: Any, tokens: Any) -> Any:
    """List the tokens base + bit of n words; the first words are dropped if `tokens` is short.

    Args:
        places: int32 [n] scratch.

    Returns:
        how many.
    """
    words, total = 0, 0
    for i in range(n):
        places[words] = i
        words += np.int64(chosen[i] != _ZERO)
        total += _bits_set(chosen[i])  # type: ignore[call-arg]
    count, oldest = 0, 0
    while total > len(tokens):
        total -= _bits_set(chosen[np.int64(places[oldest])])  # type: ignore[call-arg]
        oldest += 1
    for w in range(oldest, words):
        place = np.int64(places[w])
        bits, token = chosen[place], base + 64 * place
        if count + 64 > len(tokens):
            while bits != _ZERO and count < len(tokens):
                tokens[count] = token + np.int64(trailing_zeros(bits))  # type: ignore[call-arg]
                bits &= bits - _ONE
                count += 1
            continue
        # Four at a time, whether there are so many or not: a branch for each would be mispredicted
        # at almost every word's end.
        after = count + _bits_set(bits)  # type: ignore[call-arg]
        while count < after:
            for k in range(4):
                tokens[count + k] = token + np.int64(trailing_zeros(bits))
                bits &= bits - _ONE
            count += 4
        count = after
    return count
