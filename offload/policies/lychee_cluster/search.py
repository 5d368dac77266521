"""Search of LycheeCluster's index: which tokens may have the attention of a query.

Centroids are ranked (arXiv 2603.08453, section 4.4) by an upper bound, where q is the sum of the
group's query heads: the sum of their scores is the score of their sum, so one vector bounds the
group's total as well as eq. 2 bounds each head's. Eq. 2 bounds what a chunk's unit-length mean
scores, q·mu + |q| r; a token's key k is within the spread s of its chunk's mean, which is n long:

    q·k <= n (q·mu + |q| r) + |q| s

Clusters are ranked by this with |q| weighed by `radius_weight`, n the mean of the cluster's chunks
and s the largest: without n and s, chunks of one heavy token among light ones are missed.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros

from offload.policies.callback import (
    callback,
    prefetch,
    prefetch_line,
    read_context,
    score_int8,
    top_k,
    view_float32,
    view_int32,
)
from offload.policies.layouts import NumberLayout
from offload.policies.lychee_cluster.chunks import MAX_CHUNK_TOKENS, chunk_start
from offload.policies.lychee_cluster.layout import (
    MAX_UNITS,
    UNITS_LENGTH,
    read_state,
)
from offload.policies.lychee_cluster.views import (
    ENDS,
    FOUND,
    OPENED,
    PARTIAL,
    bits_of_float,
    from_bfloat16,
    header_of,
    index_of,
    link_of,
    scratch_of,
)

NUMBERS = NumberLayout(
    "candidate_ratio",
    "kept_units",
    "radius_weight",
    "unindexed_limit",
    "min_chunk_tokens",
    "max_chunk_tokens",
    "short_context_ratio",
)
read_numbers = NUMBERS.read
SHORT_CONTEXT_BUDGETS = 16  # a context is short up to so many of the policy's budgets
_CHOICE = 2.5  # clusters to rank, for each that will be taken
SIZE_OF_BEST = 1.45  # of the mean: large clusters have high bounds
_NO_KEY = np.int32(-(1 << 31))


@numba.njit(cache=True)
def _rank_rows(header: Any, scores: Any, scales: Any, first: int, n: int, slack: float) -> None:
    """Raw sums of rows `first` on -> norm (q·mu + slack radius) + slack spread, in place."""
    norm_step, spread_step = header.norm_step, header.spread_step
    weight = np.float32(slack)
    steps, radii = scales[0, first : first + n], scales[1, first : first + n]
    codes = scales[2, first : first + n]
    for i in range(n):
        scale, radius, code = from_bfloat16(steps[i]), from_bfloat16(radii[i]), codes[i]
        norm = np.float32(code & 0xFF) * norm_step
        spread = np.float32(code >> 8) * spread_step
        scores[i] = norm * (scores[i] * scale + weight * radius) + weight * spread


@numba.njit(cache=True)
def take_best(scores: Any, n: int) -> int:
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
def _order_scores(scores: Any, keys: Any) -> None:
    """int32 keys in the order of float32 scores, NaN below all; may be the same memory."""
    for i in range(len(keys)):
        bits = np.int32(bits_of_float(scores[i]))
        key = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        keys[i] = key if scores[i] == scores[i] else _NO_KEY


@numba.njit(cache=True)
def _take_best_key(keys: Any) -> int:
    """Position of the first of the largest keys, which is then taken out; -1 if none is left."""
    largest = _NO_KEY
    for i in range(len(keys)):
        largest = max(largest, keys[i])
    best = np.int32(len(keys))
    for i in range(len(keys)):
        best = min(best, np.int32(i) if keys[i] == largest else np.int32(len(keys)))
    keys[best] = _NO_KEY
    return int(best) if largest > _NO_KEY else -1


@numba.njit(cache=True)
def _flag_clusters(index: Any, clusters: Any, flags: Any, room: int, bounds: Any) -> int:
    """Flag the chunks of clusters, the newest first, while `room` tokens last; tokens flagged.

    A chunk that fits in part only is noted in `bounds` (chunk, first token).
    """
    blocks, offsets, links, high = index.blocks, index.offsets, index.links, index.high
    num_clusters = index.header.num_clusters
    taken = 0
    for cluster in clusters:
        link = link_of(links, high, cluster)
        while link > 0 and taken < room:
            chunk = link - 1
            word, bit = chunk >> 6, np.uint64(1) << np.uint64(chunk & 63)
            if flags[word] & bit:
                break  # the cluster was taken in an earlier round
            start, end = chunk_start(blocks, offsets, chunk), chunk_start(blocks, offsets, link)
            if taken + end - start > room:
                bounds[0], bounds[1] = chunk, end - (room - taken)
                start = bounds[1]
            flags[word] |= bit
            taken += end - start
            link = link_of(links, high, num_clusters + chunk)
    return taken


@numba.njit(cache=True)
def _write_flagged(index: Any, flags: Any, bounds: Any, last: int, address: int) -> int:
    """Tokens below `last` of the flagged chunks, ascending, at `address`; clears the flags."""
    blocks, offsets = index.blocks, index.offsets
    count = 0
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
            first = np.int32(start)
            tokens = view_int32(address + 4 * count, MAX_CHUNK_TOKENS)
            for i in range(MAX_CHUNK_TOKENS):  # one vector; what is too much is written over
                tokens[i] = first + np.int32(i)
            count += max(0, end - start)
    return count


@numba.njit(cache=True)
def _sum_queries(ctx: Any, address: int) -> float:
    """Write the sum of the group's queries; its norm."""
    width = ctx.head_dim
    query = view_float32(ctx.query, ctx.group_size * width)
    total = view_float32(address, width)
    total[:] = query[:width]
    for g in range(1, ctx.group_size):
        head = query[g * width : (g + 1) * width]
        for d in range(width):
            total[d] += head[d]
    a = b = c = e = 0.0  # side by side: each waits for its last addition
    for d in range(0, width, 4):
        a += total[d] * total[d]
        b += total[d + 1] * total[d + 1]
        c += total[d + 2] * total[d + 2]
        e += total[d + 3] * total[d + 3]
    return float(np.sqrt((a + b) + (c + e)))


@numba.njit(inline="always")
def cluster_tokens(ctx: Any, header: Any) -> Any:
    """Mean tokens of a fine cluster."""
    return max(1, header.indexed_end - ctx.first) / header.num_clusters


@numba.njit(inline="always")
def _buffered(ctx: Any, header: Any) -> Any:
    """How many tokens before the recent window are in no chunk, as far as the budget goes."""
    return max(0, min(ctx.last - max(header.indexed_end, ctx.first), ctx.budget_tokens))


@numba.njit(inline="always")
def prefetch_unit(ctx: Any, index: Any, unit: Any) -> Any:
    """Ask for the clusters of a coarse unit: what ranking them reads; their bytes."""
    header, ranges = index.header, index.ranges
    num_rows = header.num_units + header.num_clusters
    first = np.int64(ranges[unit])
    n = ranges[unit + 1] - first
    row = header.num_units + first
    state = read_state(ctx.arrays)
    prefetch(state.rows + (ctx.unit * num_rows + row) * ctx.head_dim, n * ctx.head_dim)
    for kind in range(3):
        prefetch(state.scales + 2 * ((3 * ctx.unit + kind) * num_rows + row), 2 * n)
    return n * (ctx.head_dim + 6)


@numba.njit
def _visit_units(
    pointer: Any, ctx: Any, index: Any, scratch: Any, slack: float, wanted: int
) -> int:
    """Rank the fine clusters of the best coarse units; how many clusters that are, -1 for NaN.

    Their ranks are in the scores, unit by unit; `units` holds the units and, from ENDS on, where
    the clusters of each end. Units: so many as asked for, and enough to choose from.
    """
    header, scales, ranges, query = index.header, index.scales, index.ranges, scratch.query
    num_units, num_clusters = header.num_units, header.num_clusters
    scores = view_float32(scratch.scores, max(num_clusters, MAX_UNITS))
    units = view_int32(scratch.units, UNITS_LENGTH)
    base = read_state(ctx.arrays).rows + ctx.unit * (num_units + num_clusters) * ctx.head_dim
    kept_units = read_numbers(ctx.parameters).kept_units
    enough = _CHOICE * wanted / cluster_tokens(ctx, header)
    score_int8(pointer, ctx.score_int8, query, 1, base, num_units, scratch.scores)
    _rank_rows(header, scores, scales, 0, num_units, slack)
    prepared = np.uint64(0)
    for i in range(units[OPENED]):
        prepared |= np.uint64(1) << np.uint64(units[i])
    keys = view_int32(scratch.scores, num_units)
    _order_scores(scores, keys)
    kept = 0
    visited = 0
    while kept < num_units and (kept < kept_units or visited < enough):
        unit = _take_best_key(keys)
        if unit < 0:
            return -1
        units[kept] = unit
        kept += 1
        visited += ranges[unit + 1] - ranges[unit]
        if (prepared >> np.uint64(unit)) & np.uint64(1) == 0:
            prefetch_unit(ctx, index, unit)
    units[OPENED] = kept
    visited = 0
    for i in range(kept):
        first = ranges[units[i]]
        n = ranges[units[i] + 1] - first
        score_int8(
            pointer,
            ctx.score_int8,
            query,
            1,
            base + (num_units + first) * ctx.head_dim,
            n,
            scratch.scores + 4 * visited,
        )
        _rank_rows(header, scores[visited:], scales, num_units + first, n, slack)
        visited += n
        units[ENDS + i] = visited
    ctx.bytes_touched += 4 * (num_units + visited)
    return visited


@numba.njit
def _take_clusters(
    pointer: Any, ctx: Any, index: Any, scratch: Any, visited: int, needed: int, wanted: int
) -> bool:
    """Flag the chunks of the best of the visited clusters, about `wanted` tokens; False for NaN.

    The sizes of clusters are not known before they are walked: as many as should hold `wanted`
    tokens are taken, and more while that was too few.
    """
    header, links = index.header, index.links
    picked = view_int32(scratch.picked, header.num_clusters)
    units = view_int32(scratch.units, UNITS_LENGTH)
    partial = view_int32(scratch.units + 4 * PARTIAL, 2)
    partial[0] = -1
    room = header.candidate_capacity - (ctx.budget_tokens - needed)  # beside the buffer
    chunk_links = links.ctypes.data + 2 * header.num_clusters
    first_offset = index.offsets.ctypes.data
    taken = 0
    k = 0
    size = SIZE_OF_BEST * cluster_tokens(ctx, header)
    while (taken < needed or taken < 0.9 * wanted) and k < visited and taken < room:
        k = min(visited, k + 1 + int((wanted - taken) / size))
        count: int = top_k(pointer, ctx.top_k, scratch.scores, visited, k, scratch.picked)
        if count < 0:
            scratch.flags[:] = 0
            return False
        i = 0
        for p in range(count):
            while picked[p] >= units[ENDS + i]:
                i += 1
            cluster = index.ranges[units[i] + 1] - (units[ENDS + i] - picked[p])
            picked[p] = cluster
            # Chunks are anywhere: walking the lists one by one would wait for each of them.
            chunk = max(link_of(links, index.high, cluster) - 1, 0)
            prefetch_line(chunk_links + 2 * chunk)
            prefetch_line(first_offset + chunk)
        taken += _flag_clusters(index, picked[:count], scratch.flags, room - taken, partial)
        size = max(1.0, taken / k)
    return True


@callback
def propose(pointer: Any) -> int:
    """The tokens of the best clusters, and those of the buffer."""
    ctx = read_context(pointer)
    index = index_of(ctx)
    header = index.header
    scratch = scratch_of(ctx, header)
    ctx.candidates = scratch.candidates
    tokens = view_int32(ctx.candidates, header.candidate_capacity)
    buffered = _buffered(ctx, header)
    needed = ctx.budget_tokens - buffered
    count = 0
    if needed > 0 and header.num_chunks > 0:
        numbers = read_numbers(ctx.parameters)
        slack = numbers.radius_weight * _sum_queries(ctx, scratch.query)
        ratio = numbers.candidate_ratio
        if ctx.kv_len <= SHORT_CONTEXT_BUDGETS * ctx.budget_tokens:
            ratio = max(ratio, numbers.short_context_ratio)
        wanted = int(needed * ratio)
        visited = _visit_units(pointer, ctx, index, scratch, slack, wanted)
        if visited < 0:
            return -1
        if not _take_clusters(pointer, ctx, index, scratch, visited, needed, wanted):
            return -1
        partial = view_int32(scratch.units + 4 * PARTIAL, 2)
        count = _write_flagged(index, scratch.flags, partial, ctx.last, ctx.candidates)
        view_int32(scratch.units, UNITS_LENGTH)[FOUND] = count
        ctx.bytes_touched += 4 * count
    for token in range(ctx.last - buffered, ctx.last):
        tokens[count] = token
        count += 1
    return count


@callback
def select(pointer: Any) -> int:
    """The heaviest candidates; those of the buffer stay, whatever they weigh."""
    ctx = read_context(pointer)
    header = header_of(ctx)
    buffered = min(_buffered(ctx, header), ctx.num_candidates)
    indexed = ctx.num_candidates - buffered
    count = 0
    if indexed > 0 and ctx.budget_tokens > buffered:
        count = top_k(
            pointer, ctx.top_k, ctx.importance, indexed, ctx.budget_tokens - buffered, ctx.indices
        )
        if count < 0:
            return -1
    positions = view_int32(ctx.indices, ctx.budget_tokens)
    for i in range(indexed, ctx.num_candidates):
        positions[count] = i
        count += 1
    return count
