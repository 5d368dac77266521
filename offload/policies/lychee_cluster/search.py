"""Search of LycheeCluster's index: which tokens may have the attention of a query.

A chunk's rank is the largest that one of the group's query heads q gives it: the largest q·x of an
ellipsoid around its keys,

    q·c + spread_weight sqrt(sum_d (q_d w_d)^2),

where w are half of the widths of the box that the keys fill, and c is between their mean and the
centre of that box. A mean tells where most of a chunk's keys are; heads that look for single tokens
look for those that are unlike their neighbours, and what they are unlike in is seldom what the
query asks for: a radius, which knows no directions, lets the widest chunks win. Where there are
more chunks than a search ranks, those of the coarse units are whose own ellipsoids rank best.

Candidates are the tokens of the best chunks, and those that had the most attention in the step
before: a head that looks at a token tends to look at it again.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros

from offload.policies.lychee_cluster.carry import carried_tokens, carry
from offload.policies.lychee_cluster.chunks import MAX_CHUNK_TOKENS, chunk_start
from offload.policies.lychee_cluster.layout import (
    MAX_UNITS,
    UNITS_LENGTH,
    read_state,
)
from offload.policies.lychee_cluster.ordering import order_scores, take_best_key
from offload.policies.lychee_cluster.views import (
    ENDS,
    FOUND,
    OPENED,
    PARTIAL,
    RANGES,
    chunk_at,
    header_of,
    index_of,
    scratch_of,
)
from offload.selection.callback import (
    callback,
    prefetch,
    prefetch_line,
    rank_rows,
    read_context,
    top_k,
    view_float32,
    view_int32,
)
from offload.selection.compiled import cached_njit
from offload.selection.layouts import NumberLayout

NUMBERS = NumberLayout(
    "candidate_ratio",
    "least_candidates",
    "ranked_chunks",
    "spread_weight",
    "carried_share",
    "unindexed_limit",
    "min_chunk_tokens",
    "max_chunk_tokens",
)
read_numbers = NUMBERS.read
_AHEAD = 0.97  # of the room: how many tokens so many chunks have is not known before
_INFINITE = 0x7F800000  # bits of a float32 without its sign; NaN has more
_CHOICE = 2.5  # chunks to rank, for each that will be taken


@numba.njit
def _rank_ranges(
    pointer: Any, ctx: Any, index: Any, scratch: Any, first_row: int, num_ranges: int
) -> int:
    """Ranks of the rows in RANGES, counted from `first_row` on, to the scores; DEFERRED where the
    workers will write them.
    """
    header, state, width = index.header, read_state(ctx.arrays), ctx.head_dim
    num_rows = header.num_units + header.capacity_chunks
    rows = state.rows + (ctx.unit * num_rows + first_row) * width
    scales = state.scales + 2 * (2 * ctx.unit * num_rows + first_row)
    weight = np.float32(read_numbers(ctx.parameters).spread_weight)
    of_rows = (ctx.query, ctx.group_size, rows, scales, scales + 2 * num_rows, weight)
    ranges = scratch.units + 4 * RANGES
    done: int = rank_rows(pointer, ctx.rank_rows, (*of_rows, ranges, num_ranges, scratch.scores))
    return done


@cached_njit()
def _flag_chunks(index: Any, places: Any, flags: Any, room: int, bounds: Any) -> int:
    """Flag the chunks at these places, while `room` tokens last; tokens flagged.

    A chunk that fits in part only is noted in `bounds` (chunk, first token).
    """
    blocks, offsets = index.blocks, index.offsets
    taken = 0
    for place in places:
        if taken >= room:
            break
        chunk = chunk_at(index.order, index.high, place)
        word, bit = chunk >> 6, np.uint64(1) << np.uint64(chunk & 63)
        if flags[word] & bit:
            continue  # it was taken in an earlier round
        start, end = chunk_start(blocks, offsets, chunk), chunk_start(blocks, offsets, chunk + 1)
        if taken + end - start > room:
            bounds[0], bounds[1] = chunk, end - (room - taken)
            start = bounds[1]
        flags[word] |= bit
        taken += end - start
    return taken


@cached_njit()
def _write_flagged(
    index: Any, flags: Any, bounds: Any, last: int, others: Any, address: int
) -> int:
    """Tokens below `last` of the flagged chunks and `others`, ascending, at `address`; clears the
    flags.
    """
    blocks, offsets = index.blocks, index.offsets
    count = 0
    k = 0  # of the others
    for word in range(len(flags)):
        bits = flags[word]
        if bits == 0:
            continue
        flags[word] = 0
        while bits != 0:
            chunk = word * 64 + np.int64(trailing_zeros(bits))  # type: ignore[call-arg]
            bits &= bits - np.uint64(1)
            start = chunk_start(blocks, offsets, chunk)
            if chunk == bounds[0]:
                start = bounds[1]
            end = min(chunk_start(blocks, offsets, chunk + 1), last)
            while k < len(others) and others[k] < start:
                view_int32(address, count + 1)[count] = others[k]
                count += 1
                k += 1
            while k < len(others) and others[k] < end:
                k += 1
            first = np.int32(start)
            tokens = view_int32(address + 4 * count, MAX_CHUNK_TOKENS)
            for i in range(MAX_CHUNK_TOKENS):  # one vector; what is too much is written over
                tokens[i] = first + np.int32(i)
            count += max(0, end - start)
    for i in range(k, len(others)):
        view_int32(address, count + 1)[count] = others[i]
        count += 1
    return count


@cached_njit()
def _is_finite(ctx: Any) -> bool:
    """Whether all of the group's queries are."""
    bits = view_int32(ctx.query, ctx.group_size * ctx.head_dim)
    largest = np.int32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.int32(_INFINITE))
    return bool(largest < _INFINITE)


@numba.njit(inline="always")
def chunk_tokens(ctx: Any, header: Any) -> Any:
    """Mean tokens of a chunk."""
    return max(1, header.indexed_end - ctx.first) / max(1, header.num_chunks)


@numba.njit(inline="always")
def places_of(index: Any, unit: Any) -> Any:
    """First place of a unit, and how many it has; one past the units: what was grafted."""
    header = index.header
    first = np.int64(index.ranges[unit])
    end = header.num_chunks if unit == header.num_units else np.int64(index.ranges[unit + 1])
    return first, end - first


@numba.njit(inline="always")
def _buffered(ctx: Any, header: Any) -> Any:
    """How many tokens before the recent window are in no chunk, as far as the budget goes."""
    return max(0, min(ctx.last - max(header.indexed_end, ctx.first), ctx.budget_tokens))


@numba.njit(inline="always")
def prefetch_unit(ctx: Any, index: Any, unit: Any) -> Any:
    """Ask for the chunks of a coarse unit: what ranking them reads; their bytes."""
    header, width = index.header, ctx.head_dim
    num_rows = header.num_units + header.capacity_chunks
    first, n = places_of(index, unit)
    row = header.num_units + first
    state = read_state(ctx.arrays)
    prefetch(state.rows + (ctx.unit * num_rows + row) * width, n * width)
    for kind in range(2):
        prefetch(state.scales + 2 * ((2 * ctx.unit + kind) * num_rows + row), 2 * n)
    return n * (width + 4)


@numba.njit
def _open_units(pointer: Any, ctx: Any, index: Any, scratch: Any, wanted: int) -> int:
    """The coarse units to look into, to `units`: the best, and what was grafted; -1 for NaN."""
    header = index.header
    num_units = header.num_units
    scores = view_float32(scratch.scores, MAX_UNITS)
    units = view_int32(scratch.units, UNITS_LENGTH)
    ranked_chunks = read_numbers(ctx.parameters).ranked_chunks
    built = np.int64(index.ranges[num_units])
    kept = 0
    if built <= ranked_chunks:
        for unit in range(num_units):
            units[unit] = unit
        kept = num_units
    else:
        units[RANGES], units[RANGES + 1] = 0, num_units
        _rank_ranges(pointer, ctx, index, scratch, 0, 1)
        keys = view_int32(scratch.scores, num_units)
        order_scores(scores, keys)
        enough = max(_CHOICE * wanted / chunk_tokens(ctx, header), ranked_chunks)
        visited = 0
        while kept < num_units and (kept < 1 or visited < enough):
            unit = take_best_key(keys)
            if unit < 0:
                return -1
            units[kept] = unit
            kept += 1
            visited += places_of(index, unit)[1]
    if header.num_chunks > built:
        units[kept] = num_units
        kept += 1
    units[OPENED] = kept
    return kept


@numba.njit
def _visit_units(pointer: Any, ctx: Any, index: Any, scratch: Any, wanted: int) -> int:
    """Rank the chunks of the best coarse units; how many that are, -1 for NaN, DEFERRED
    where others rank them.

    Their ranks are in the scores, unit by unit; `units` holds the units, from ENDS on where the
    chunks of each end there, and from RANGES on which places they have.
    """
    if not _is_finite(ctx):
        return -1
    units = view_int32(scratch.units, UNITS_LENGTH)
    kept = _open_units(pointer, ctx, index, scratch, wanted)
    visited = 0
    for i in range(kept):
        first, n = places_of(index, units[i])
        visited += n
        units[ENDS + i] = visited
        units[RANGES + 2 * i], units[RANGES + 2 * i + 1] = first, first + n
    if kept < 0:
        return -1
    done = _rank_ranges(pointer, ctx, index, scratch, index.header.num_units, kept)
    return visited if done == 0 else done


@numba.njit(inline="always")
def _place_at(units: Any, i: Any, position: Any) -> Any:
    """Place of a position in the scores, those of the i-th opened unit."""
    return units[RANGES + 2 * i + 1] - (units[ENDS + i] - position)


@numba.njit
def _take_chunks(
    pointer: Any, ctx: Any, index: Any, scratch: Any, visited: int, needed: int, wanted: int
) -> bool:
    """Flag the best of the visited chunks, about `wanted` tokens; False for NaN.

    Their sizes are not known before they are walked: as many as should hold `wanted` tokens are
    taken, and more while that was too few.
    """
    header = index.header
    picked = view_int32(scratch.picked, header.num_chunks)
    units = view_int32(scratch.units, UNITS_LENGTH)
    partial = view_int32(scratch.units + 4 * PARTIAL, 2)
    room = header.candidate_capacity - header.carried_tokens - (ctx.budget_tokens - needed)
    if ctx.ahead:
        room = needed
    first_offset = index.offsets.ctypes.data
    taken = 0
    k = 0
    size = chunk_tokens(ctx, header)
    least = max(min(needed, wanted), 0.9 * wanted)
    while taken < least and k < visited and taken < room:
        k = min(visited, k + 1 + int((wanted - taken) / size))
        count: int = top_k(pointer, ctx.top_k, scratch.scores, visited, k, scratch.picked)
        if count < 0:
            scratch.flags[:] = 0
            return False
        i = 0
        for p in range(count):
            while picked[p] >= units[ENDS + i]:
                i += 1
            picked[p] = _place_at(units, i, picked[p])
            # Chunks are anywhere: each would be waited for.
            prefetch_line(first_offset + chunk_at(index.order, index.high, picked[p]))
        taken += _flag_chunks(index, picked[:count], scratch.flags, room - taken, partial)
        size = max(1.0, taken / k)
    return True


@callback
def propose(pointer: Any) -> int:
    """The tokens of the best chunks, what was carried, and the tokens of the buffer."""
    ctx = read_context(pointer)
    index = index_of(ctx)
    header = index.header
    scratch = scratch_of(ctx, header)
    ctx.candidates = scratch.candidates
    tokens = view_int32(ctx.candidates, header.candidate_capacity)
    buffered = _buffered(ctx, header)
    needed = ctx.budget_tokens - buffered
    count = 0
    if ctx.budget_tokens > 0 and header.num_chunks > 0:
        numbers = read_numbers(ctx.parameters)
        ratio, least = numbers.candidate_ratio, int(numbers.least_candidates)
        wanted = max(int(needed * ratio), least - buffered)
        if ctx.ahead:  # nothing will be scored: the best chunks are the choice
            wanted = int(_AHEAD * needed)
        if ctx.resumes:
            units = view_int32(scratch.units, UNITS_LENGTH)
            visited = np.int64(units[ENDS + units[OPENED] - 1])
        else:
            visited = np.int64(_visit_units(pointer, ctx, index, scratch, wanted))
        if visited < 0:
            return int(visited)
        partial = view_int32(scratch.units + 4 * PARTIAL, 2)
        partial[0] = -1
        if not _take_chunks(pointer, ctx, index, scratch, visited, needed, wanted):
            return -1
        others = carried_tokens(ctx, header)
        if ctx.ahead:  # beside the best chunks they are more than the budget: all would be scored
            others = others[:0]
        count = _write_flagged(index, scratch.flags, partial, ctx.last, others, ctx.candidates)
        view_int32(scratch.units, UNITS_LENGTH)[FOUND] = count
        ctx.bytes_touched += 4 * count
    for token in range(ctx.last - buffered, ctx.last):
        tokens[count] = token
        count += 1
    return count


@callback
def select(pointer: Any) -> int:
    """The heaviest candidates."""
    ctx = read_context(pointer)
    header = header_of(ctx)
    count: int = top_k(
        pointer, ctx.top_k, ctx.importance, ctx.num_candidates, ctx.budget_tokens, ctx.indices
    )
    if count < 0:
        return -1
    indexed = ctx.num_candidates - min(_buffered(ctx, header), ctx.num_candidates)
    if indexed > 0 and header.carried_tokens > 0:
        carry(pointer, ctx, header, indexed)
    return count
