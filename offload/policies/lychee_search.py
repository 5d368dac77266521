"""The callbacks of LycheeCluster: search of the index, and grafting of new chunks onto it.

Search (arXiv 2603.08453, section 4.4) ranks centroids by q·mu + w |q| r, where q is the sum of the
group's query heads: the sum of their scores is the score of their sum, so one vector bounds the
group's total as well as eq. 2 bounds each head's. With w = 1 that is the bound itself.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

from offload.policies.callback import (
    _cast,
    callback,
    load_keys,
    read_context,
    score_int8,
    top_k,
    view_float32,
    view_int32,
    view_uint8,
)
from offload.policies.lychee_chunks import (
    BLOCK,
    MAX_CHUNK_TOKENS,
    chunk_length,
    chunk_start,
    set_chunk_start,
)
from offload.policies.lychee_index import (
    CANDIDATE_CAPACITY,
    CAPACITY_CHUNKS,
    HAS_HIGH_LINKS,
    HEADER,
    HEADER_COLUMNS,
    INDEXED_END,
    LINKS,
    LINKS_HIGH,
    NUM_CHUNKS,
    NUM_CLUSTERS,
    NUM_UNITS,
    RANGES,
    ROWS,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    STARTS,
)

# ctx.parameters
CANDIDATE_RATIO, KEPT_UNITS, RADIUS_WEIGHT, UNINDEXED_LIMIT, MIN_CHUNK, MAX_CHUNK = range(6)
_MAX_UNITS = 64
_GRAFT_UNITS = 3  # coarse units in which a new chunk looks for its cluster
_MAX_COUNT = 255  # members that weigh in a moving average

_as_int8 = _cast(types.int8)
_as_int64 = _cast(types.int64)
_as_uint16 = _cast(types.uint16)
_as_uint64 = _cast(types.uint64)


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


_float_of_bits = _bitcast(types.uint32, types.float32, ir.FloatType())
_bits_of_float = _bitcast(types.float32, types.uint32, ir.IntType(32))


@numba.njit(inline="always")
def _from_bfloat16(bits: Any) -> Any:
    return _float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@numba.njit(inline="always")
def _bfloat16_up(x: Any) -> Any:
    """Bits of the smallest bfloat16 >= x, for x >= 0."""
    bits = np.int64(_bits_of_float(np.float32(x)))  # type: ignore[call-arg]
    return np.uint16((bits + 0xFFFF) >> 16)


@numba.njit(inline="always")
def _header(ctx: Any) -> Any:
    address = ctx.arrays[HEADER] + 8 * HEADER_COLUMNS * ctx.unit
    return carray(_as_int64(address), HEADER_COLUMNS)


@numba.njit(cache=True)
def _index(ctx: Any) -> Any:
    """header, rows, scales, ranges, block starts, offsets, links, high links of ctx.unit."""
    header = _header(ctx)
    num_rows = header[NUM_UNITS] + header[NUM_CLUSTERS]
    capacity = header[CAPACITY_CHUNKS]
    num_links = header[NUM_CLUSTERS] + capacity
    num_ranges = 2 * header[NUM_UNITS] + 1
    num_blocks = capacity // BLOCK + 1
    rows = carray(
        _as_int8(ctx.arrays[ROWS] + ctx.unit * num_rows * ctx.head_dim), (num_rows, ctx.head_dim)
    )
    scales = carray(_as_uint16(ctx.arrays[SCALES] + ctx.unit * num_rows * 4), (num_rows, 2))
    ranges = view_int32(ctx.arrays[RANGES] + ctx.unit * num_ranges * 4, num_ranges)
    blocks = view_int32(ctx.arrays[STARTS], num_blocks)
    offsets = view_uint8(ctx.arrays[STARTS] + 4 * num_blocks, capacity + 1)
    links = carray(_as_uint16(ctx.arrays[LINKS] + ctx.unit * num_links * 2), num_links)
    high = view_uint8(
        ctx.arrays[LINKS_HIGH] + ctx.unit * num_links * header[HAS_HIGH_LINKS],
        num_links * header[HAS_HIGH_LINKS],
    )
    return header, rows, scales, ranges, blocks, offsets, links, high


@numba.njit(cache=True)
def _scratch(ctx: Any, header: Any) -> Any:
    """flags uint64, and addresses: query, keys, centroids, scores, candidates, picked, units."""
    base = ctx.arrays[SCRATCH] + ctx.unit * header[SCRATCH_BYTES]
    num_words = header[CAPACITY_CHUNKS] // 64 + 1
    query = base + 8 * num_words
    keys = query + 4 * ctx.head_dim
    centroids = keys + 4 * ctx.head_dim * MAX_CHUNK_TOKENS
    scores = centroids + 8 * ctx.head_dim
    candidates = scores + 4 * max(header[NUM_CLUSTERS], _MAX_UNITS)
    picked = candidates + 4 * header[CANDIDATE_CAPACITY]
    units = picked + 4 * header[NUM_CLUSTERS]
    flags = carray(_as_uint64(base), num_words)
    return flags, query, keys, centroids, scores, candidates, picked, units


@numba.njit(inline="always")
def _link(links: Any, high: Any, i: Any) -> Any:
    if len(high) > 0:
        return np.int64(links[i]) | np.int64(high[i]) << 16
    return np.int64(links[i])


@numba.njit(inline="always")
def _set_link(links: Any, high: Any, i: Any, link: Any) -> None:
    links[i] = link & 0xFFFF
    if len(high) > 0:
        high[i] = link >> 16


@numba.njit(cache=True)
def _upper_bounds(scores: Any, scales: Any, first: int, n: int, slack: float) -> None:
    """Raw sums of rows `first` on -> q·mu + slack * radius, in place."""
    for i in range(n):
        scale = _from_bfloat16(scales[first + i, 0])
        radius = _from_bfloat16(scales[first + i, 1])
        scores[i] = scores[i] * scale + np.float32(slack) * radius


@numba.njit(cache=True)
def _take_best(scores: Any, n: int) -> int:
    """Position of the largest score, which is then taken out; -1 if no number is left."""
    best = -1
    largest = -np.inf
    for i in range(n):
        if scores[i] > largest:
            best, largest = i, scores[i]
    if best >= 0:
        scores[best] = -np.inf
    return best


@numba.njit(cache=True)
def _mark_cluster(index: Any, cluster: int, flags: Any, room: int, bounds: Any) -> int:
    """Flag the chunks of a cluster, the newest first, while `room` tokens last; tokens flagged.

    A chunk that fits in part only is noted in `bounds` (chunk, first token).
    """
    header, _, _, _, blocks, offsets, links, high = index
    taken = 0
    link = _link(links, high, cluster)
    while link > 0 and taken < room:
        chunk = link - 1
        word, bit = chunk >> 6, np.uint64(1) << np.uint64(chunk & 63)
        if flags[word] & bit:
            break  # the cluster was taken in an earlier round
        start, end = chunk_start(blocks, offsets, chunk), chunk_start(blocks, offsets, chunk + 1)
        if taken + end - start > room:
            bounds[0], bounds[1] = chunk, end - (room - taken)
            start = bounds[1]
        flags[word] |= bit
        taken += end - start
        link = _link(links, high, header[NUM_CLUSTERS] + chunk)
    return taken


@numba.njit(cache=True)
def _write_flagged(index: Any, flags: Any, bounds: Any, last: int, tokens: Any) -> int:
    """Tokens below `last` of the flagged chunks, ascending; clears the flags."""
    _, _, _, _, blocks, offsets, _, _ = index
    count = 0
    for word in range(len(flags)):
        bits = flags[word]
        if bits == 0:
            continue
        flags[word] = 0
        while bits != 0:
            chunk = word * 64 + np.int64(trailing_zeros(bits))
            bits &= bits - np.uint64(1)
            start = chunk_start(blocks, offsets, chunk)
            if chunk == bounds[0]:
                start = bounds[1]
            end = min(chunk_start(blocks, offsets, chunk + 1), last)
            for token in range(start, end):
                tokens[count] = token
                count += 1
    return count


@numba.njit(cache=True)
def _sum_queries(ctx: Any, address: int) -> float:
    """Write the sum of the group's queries; its norm."""
    query = view_float32(ctx.query, ctx.group_size * ctx.head_dim)
    total = view_float32(address, ctx.head_dim)
    squares = 0.0
    for d in range(ctx.head_dim):
        x = np.float32(0)
        for g in range(ctx.group_size):
            x += query[g * ctx.head_dim + d]
        total[d] = x
        squares += x * x
    return np.sqrt(squares)


@numba.njit(inline="always")
def _buffered(ctx: Any, header: Any) -> Any:
    """How many tokens before the recent window are in no chunk, as far as the budget goes."""
    return max(0, min(ctx.last - max(header[INDEXED_END], ctx.first), ctx.budget_tokens))


@callback
def propose(pointer: Any) -> int:
    ctx = read_context(pointer)
    index = _index(ctx)
    header, rows, scales, ranges, blocks, offsets, links, high = index
    flags, query, keys, centroids, score_address, candidates, picked_address, units_address = (
        _scratch(ctx, header)
    )
    ctx.candidates = candidates
    buffered = _buffered(ctx, header)
    needed = ctx.budget_tokens - buffered
    count = 0
    if needed > 0 and header[NUM_CHUNKS] > 0:
        norm = _sum_queries(ctx, query)
        slack = ctx.parameters[RADIUS_WEIGHT] * norm
        num_units, num_clusters = header[NUM_UNITS], header[NUM_CLUSTERS]
        scores = view_float32(score_address, max(num_clusters, _MAX_UNITS))
        wanted = int(needed * ctx.parameters[CANDIDATE_RATIO])
        cluster_tokens = (header[INDEXED_END] - ctx.first) / num_clusters
        # Coarse units, the best first: so many as asked for, and enough to choose from.
        units = view_int32(units_address, 2 * _MAX_UNITS)
        score_int8(  # type: ignore[call-arg]  # mypy sees the intrinsic's typing context
            pointer,
            ctx.score_int8,
            query,
            1,
            ctx.arrays[ROWS] + ctx.unit * (num_units + num_clusters) * ctx.head_dim,
            num_units,
            score_address,
        )
        _upper_bounds(scores, scales, 0, num_units, slack)
        kept = 0
        visited = 0
        while kept < num_units and (
            kept < ctx.parameters[KEPT_UNITS] or visited * cluster_tokens < 1.5 * wanted
        ):
            unit = _take_best(scores, num_units)
            if unit < 0:
                return -1  # NaN
            units[kept] = unit
            kept += 1
            visited += ranges[unit + 1] - ranges[unit]
        # Their fine clusters.
        visited = 0
        for i in range(kept):
            first = ranges[units[i]]
            n = ranges[units[i] + 1] - first
            row = num_units + first
            score_int8(  # type: ignore[call-arg]
                pointer,
                ctx.score_int8,
                query,
                1,
                ctx.arrays[ROWS] + (ctx.unit * (num_units + num_clusters) + row) * ctx.head_dim,
                n,
                score_address + 4 * visited,
            )
            _upper_bounds(scores[visited:], scales, row, n, slack)
            visited += n
            units[_MAX_UNITS + i] = visited
        ctx.bytes_touched += 4 * (num_units + visited)
        # The best of them, until the candidates are there.
        room = header[CANDIDATE_CAPACITY] - buffered
        picked = view_int32(picked_address, num_clusters)
        partial = view_int32(units_address + 8 * _MAX_UNITS, 2)  # a chunk that fits in part
        partial[0] = -1
        taken = 0
        k = 0
        while taken < needed or taken < 0.9 * wanted:
            if k == visited or taken >= room:
                break
            k = min(visited, k + 1 + int((wanted - taken) / cluster_tokens))
            num_picked = top_k(  # type: ignore[call-arg]
                pointer, ctx.top_k, score_address, visited, k, picked_address
            )
            if num_picked < 0:
                for word in range(len(flags)):
                    flags[word] = 0
                return -1
            i = 0
            for p in range(num_picked):
                while picked[p] >= units[_MAX_UNITS + i]:
                    i += 1
                cluster = ranges[units[i] + 1] - (units[_MAX_UNITS + i] - picked[p])
                taken += _mark_cluster(index, cluster, flags, room - taken, partial)
        tokens = view_int32(candidates, header[CANDIDATE_CAPACITY])
        count = _write_flagged(index, flags, partial, ctx.last, tokens)
        ctx.bytes_touched += 4 * count
    tokens = view_int32(candidates, header[CANDIDATE_CAPACITY])
    for token in range(ctx.last - buffered, ctx.last):
        tokens[count] = token
        count += 1
    return count


@callback
def select(pointer: Any) -> int:
    """The heaviest candidates; those of the buffer stay, whatever they weigh."""
    ctx = read_context(pointer)
    header = _header(ctx)
    buffered = min(_buffered(ctx, header), ctx.num_candidates)
    indexed = ctx.num_candidates - buffered
    count = 0
    if indexed > 0 and ctx.budget_tokens > buffered:
        count = top_k(  # type: ignore[call-arg]
            pointer, ctx.top_k, ctx.importance, indexed, ctx.budget_tokens - buffered, ctx.indices
        )
        if count < 0:
            return -1
    positions = view_int32(ctx.indices, ctx.budget_tokens)
    for i in range(indexed, ctx.num_candidates):
        positions[count] = i
        count += 1
    return count


@numba.njit(cache=True)
def _move_centroid(row: Any, scale: Any, count: int, point: Any, old: Any, new: Any) -> None:
    """Moving average of a centroid of `count` points and one more; its radius covers all of them.

    The old points are within the old radius and the way that the centroid moved.
    """
    width = len(row)
    step = _from_bfloat16(scale[0])
    radius = _from_bfloat16(scale[1])
    squares = 0.0
    for d in range(width):
        old[d] = np.float32(row[d]) * step
        new[d] = old[d] * np.float32(count) + point[d]
        squares += new[d] * new[d]
    if squares > 0:
        inverse = np.float32(1 / np.sqrt(squares))
        largest = np.float32(0)
        for d in range(width):
            new[d] *= inverse
            largest = max(largest, abs(new[d]))
        if not (126 * step < largest <= 127 * step):  # else the old scale does
            scale[0] = _bfloat16_up(largest / np.float32(127))
            step = _from_bfloat16(scale[0])
        for d in range(width):
            row[d] = np.int8(np.rint(new[d] / step))
    moved = 0.0
    distance = 0.0
    for d in range(width):
        now = np.float32(row[d]) * step
        moved += (now - old[d]) * (now - old[d])
        distance += (point[d] - now) * (point[d] - now)
    needed = np.sqrt(distance)
    if count > 0:
        needed = max(needed, radius + np.sqrt(moved))
    if needed > radius or count == 0:
        # Padded as lychee_index.padded_radius.
        scale[1] = _bfloat16_up(np.float32(needed * (1 + 1e-5) + 1e-6))


@callback
def append(pointer: Any) -> None:
    ctx = read_context(pointer)
    header = _header(ctx)
    limit = int(ctx.parameters[UNINDEXED_LIMIT])
    while (
        ctx.kv_len - header[INDEXED_END] > limit
        and header[NUM_CHUNKS] + 1 <= header[CAPACITY_CHUNKS]
    ):
        known = ctx.kv_len if ctx.text_marks != 0 else 0
        length = chunk_length(
            view_uint8(ctx.text_marks, known),
            header[INDEXED_END],
            ctx.kv_len,
            int(ctx.parameters[MIN_CHUNK]),
            int(ctx.parameters[MAX_CHUNK]),
        )
        _graft(pointer, ctx, length)


@numba.njit(cache=True)
def _chunk_key(ctx: Any, keys: Any, length: int, out: Any) -> None:
    """Unit-length mean of `length` keys."""
    squares = 0.0
    for d in range(ctx.head_dim):
        total = np.float32(0)
        for i in range(length):
            total += keys[i * ctx.head_dim + d]
        out[d] = total
        squares += total * total
    if squares > 0:
        inverse = np.float32(1 / np.sqrt(squares))
        for d in range(ctx.head_dim):
            out[d] *= inverse


@numba.njit
def _graft(pointer: Any, ctx: Any, length: int) -> None:
    """Put the next `length` tokens into the index: a chunk of the nearest cluster."""
    index = _index(ctx)
    header, rows, scales, ranges, blocks, offsets, links, high = index
    _, point_address, key_address, centroids, score_address, _, _, units_address = _scratch(
        ctx, header
    )
    num_units = header[NUM_UNITS]
    base = ctx.arrays[ROWS] + ctx.unit * len(rows) * ctx.head_dim
    scores = view_float32(score_address, max(header[NUM_CLUSTERS], _MAX_UNITS))
    load_keys(  # type: ignore[call-arg]
        pointer, ctx.load_keys, header[INDEXED_END], length, key_address
    )
    point = view_float32(point_address, ctx.head_dim)
    _chunk_key(ctx, view_float32(key_address, length * ctx.head_dim), length, point)
    score_int8(  # type: ignore[call-arg]
        pointer, ctx.score_int8, point_address, 1, base, num_units, score_address
    )
    _upper_bounds(scores, scales, 0, num_units, 0.0)
    near = view_int32(units_address, _MAX_UNITS)
    kept = min(_GRAFT_UNITS, num_units)
    for i in range(kept):
        near[i] = max(0, _take_best(scores, num_units))
    unit, cluster, largest = 0, 0, -np.inf
    for i in range(kept):
        first = ranges[near[i]]
        n = ranges[near[i] + 1] - first
        score_int8(  # type: ignore[call-arg]
            pointer,
            ctx.score_int8,
            point_address,
            1,
            base + (num_units + first) * ctx.head_dim,
            n,
            score_address,
        )
        _upper_bounds(scores, scales, num_units + first, n, 0.0)
        for j in range(n):
            if scores[j] > largest:
                unit, cluster, largest = near[i], first + j, scores[j]
    count = 0
    link = _link(links, high, cluster)
    while link > 0 and count < _MAX_COUNT:
        count += 1
        link = _link(links, high, header[NUM_CLUSTERS] + link - 1)
    old = view_float32(centroids, ctx.head_dim)
    new = view_float32(centroids + 4 * ctx.head_dim, ctx.head_dim)
    row = num_units + cluster
    _move_centroid(rows[row], scales[row], count, point, old, new)
    _move_centroid(rows[unit], scales[unit], ranges[num_units + 1 + unit], point, old, new)
    chunk = header[NUM_CHUNKS]
    _set_link(links, high, header[NUM_CLUSTERS] + chunk, _link(links, high, cluster))
    _set_link(links, high, cluster, chunk + 1)
    ranges[num_units + 1 + unit] += 1
    header[NUM_CHUNKS] += 1
    header[INDEXED_END] += length
    if ctx.unit == 0:  # the heads share the starts, and nobody reads them while tokens are appended
        set_chunk_start(blocks, offsets, chunk + 1, header[INDEXED_END])
    ctx.bytes_touched += length * ctx.head_dim * 2 + 8 * ctx.head_dim
