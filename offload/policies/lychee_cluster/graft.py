"""Grafting: LycheeCluster takes the oldest tokens of its buffer into the index, chunk by chunk.

Source: arXiv 2603.08453, section 4.4 (lazy update). A chunk goes to the nearest fine cluster, found
through the coarse units; centroids are moving averages, radii only grow, by what the new chunk and
the move of the centroid ask for.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.policies.base import State
from offload.policies.callback import (
    callback,
    load_keys,
    read_context,
    score_int8,
    view_float32,
    view_int32,
    view_uint8,
    view_uint16,
    view_uint64,
)
from offload.policies.lychee_cluster.chunks import chunk_length, set_chunk_start
from offload.policies.lychee_cluster.layout import (
    LAST_GRAFT,
    read_last_graft,
    read_state,
)
from offload.policies.lychee_cluster.search import read_numbers, take_best
from offload.policies.lychee_cluster.views import (
    HEADER_BYTES,
    NEAR,
    bfloat16_bits_up,
    from_bfloat16,
    header_of,
    index_of,
    link_of,
    scratch_of,
    set_link,
)

LAST_GRAFT_BYTES = LAST_GRAFT.itemsize
_GRAFT_UNITS = 3  # coarse units in which a new chunk looks for its cluster
_MAX_COUNT = 255  # members that weigh in a moving average


@numba.njit(cache=True)
def _move_centroid(row: Any, scale: Any, count: int, point: Any, old: Any, new: Any) -> None:
    """Moving average of a centroid of `count` points and one more; its radius covers all of them.

    The old points are within the old radius and the way that the centroid moved.
    """
    width = len(row)
    step = from_bfloat16(scale[0])
    radius = from_bfloat16(scale[1])
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
            scale[0] = bfloat16_bits_up(largest / np.float32(127))
            step = from_bfloat16(scale[0])
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
        # Padded as index.padded_radius.
        scale[1] = bfloat16_bits_up(np.float32(needed * (1 + 1e-5) + 1e-6))


@callback
def append(pointer: Any) -> None:
    ctx = read_context(pointer)
    header = header_of(ctx)
    numbers = read_numbers(ctx.parameters)
    # One chunk at most: a step that fails is taken back. What is left has its turn in the next.
    if (
        ctx.kv_len - header.indexed_end > int(numbers.unindexed_limit)
        and header.num_chunks + 1 <= header.capacity_chunks
    ):
        known = ctx.kv_len if ctx.text_marks != 0 else 0
        length = chunk_length(
            view_uint8(ctx.text_marks, known),
            header.indexed_end,
            ctx.kv_len,
            int(numbers.min_chunk_tokens),
            int(numbers.max_chunk_tokens),
        )
        _graft(pointer, ctx, length)


@numba.njit(cache=True)
def _scale_rows(scores: Any, scales: Any, first: int, n: int) -> None:
    for i in range(n):
        scores[i] *= from_bfloat16(scales[0, first + i])


@numba.njit(cache=True)
def _note_norm_and_spread(header: Any, scale: Any, count: int, norm: float, spread: float) -> None:
    """Mean norm of `count` chunks and one more, and the largest spread, in whole steps."""
    if header.norm_step == 0:  # the first chunk of an index that was built empty
        header.norm_step = np.float32(1.5 / 255 * norm)
        header.spread_step = np.float32(1.5 / 255 * spread)
    norm_step, spread_step = header.norm_step, header.spread_step
    code = np.int64(scale[2])
    mean = np.float64(code & 0xFF)
    if norm_step > 0:
        mean += (norm / norm_step - mean) / (count + 1)
    largest = code >> 8
    if spread_step > 0:
        largest = max(largest, np.int64(np.ceil(spread / spread_step)))
    scale[2] = min(255, np.int64(np.rint(mean))) | min(255, largest) << 8


@numba.njit(cache=True)
def _chunk_key(ctx: Any, keys: Any, length: int, out: Any) -> Any:
    """Writes the unit-length mean of `length` keys; its norm before, and their spread around it."""
    squares = 0.0
    for d in range(ctx.head_dim):
        total = np.float32(0)
        for i in range(length):
            total += keys[i * ctx.head_dim + d]
        out[d] = total / np.float32(length)
        squares += out[d] * out[d]
    furthest = 0.0
    for i in range(length):
        distance = 0.0
        for d in range(ctx.head_dim):
            off = keys[i * ctx.head_dim + d] - out[d]
            distance += off * off
        furthest = max(furthest, distance)
    if squares > 0:
        inverse = np.float32(1 / np.sqrt(squares))
        for d in range(ctx.head_dim):
            out[d] *= inverse
    return np.sqrt(squares), np.sqrt(furthest)


@numba.njit(cache=True)
def _note_before(ctx: Any, index: Any, unit: Any, cluster: Any) -> None:
    """Note what grafting onto a cluster will change (`take_back_graft`)."""
    state, header = read_state(ctx.arrays), index.header
    last = read_last_graft(state.last_graft + LAST_GRAFT_BYTES * ctx.unit)
    last.kv_len, last.unit, last.cluster = ctx.kv_len, unit, cluster
    last.link = link_of(index.links, index.high, cluster)
    words = HEADER_BYTES // 8
    view_uint64(state.old_header, words, ctx.unit)[:] = view_uint64(state.header, words, ctx.unit)
    old_scales = view_uint16(state.old_scales, 6, ctx.unit)
    old_rows = view_uint8(state.old_rows, 2 * ctx.head_dim, ctx.unit)
    for i in range(2):
        row = unit if i == 0 else header.num_units + cluster
        for d in range(ctx.head_dim):
            old_rows[i * ctx.head_dim + d] = np.uint8(index.rows[row, d])
        for kind in range(3):
            old_scales[3 * i + kind] = index.scales[kind, row]


@numba.njit
def _graft(pointer: Any, ctx: Any, length: int) -> None:
    """Put the next `length` tokens into the index: a chunk of the nearest cluster."""
    index = index_of(ctx)
    header, rows, scales, ranges, _, _, links, high = index
    scratch = scratch_of(ctx, header)
    point_address, key_address, score_address = scratch.query, scratch.keys, scratch.scores
    num_units = header.num_units
    base = read_state(ctx.arrays).rows + ctx.unit * len(rows) * ctx.head_dim
    scores = view_float32(score_address, max(header.num_clusters, num_units))
    load_keys(pointer, ctx.load_keys, header.indexed_end, length, key_address)
    point = view_float32(point_address, ctx.head_dim)
    keys = view_float32(key_address, length * ctx.head_dim)
    norm, spread = _chunk_key(ctx, keys, length, point)
    score_int8(pointer, ctx.score_int8, point_address, 1, base, num_units, score_address)
    _scale_rows(scores, scales, 0, num_units)
    near = view_int32(scratch.units + 4 * NEAR, _GRAFT_UNITS)
    kept = min(_GRAFT_UNITS, num_units)
    for i in range(kept):
        near[i] = max(0, take_best(scores, num_units))
    unit, cluster, largest = 0, 0, -np.inf
    for i in range(kept):
        first = ranges[near[i]]
        n = ranges[near[i] + 1] - first
        score_int8(
            pointer,
            ctx.score_int8,
            point_address,
            1,
            base + (num_units + first) * ctx.head_dim,
            n,
            score_address,
        )
        _scale_rows(scores, scales, num_units + first, n)
        for j in range(n):
            if scores[j] > largest:
                unit, cluster, largest = near[i], first + j, scores[j]
    _note_before(ctx, index, unit, cluster)
    count = 0
    link = link_of(links, high, cluster)
    while link > 0 and count < _MAX_COUNT:
        count += 1
        link = link_of(links, high, header.num_clusters + link - 1)
    old = view_float32(scratch.centroids, ctx.head_dim)
    new = view_float32(scratch.centroids, ctx.head_dim, 1)
    row = num_units + cluster
    below_unit = ranges[num_units + 1 + unit]
    _move_centroid(rows[row], scales[:, row], count, point, old, new)
    _note_norm_and_spread(header, scales[:, row], count, norm, spread)
    _move_centroid(rows[unit], scales[:, unit], below_unit, point, old, new)
    _note_norm_and_spread(header, scales[:, unit], below_unit, norm, spread)
    chunk = header.num_chunks
    set_link(links, high, header.num_clusters + chunk, link_of(links, high, cluster))
    set_link(links, high, cluster, chunk + 1)
    ranges[num_units + 1 + unit] += 1
    header.num_chunks += 1
    header.indexed_end += length
    if ctx.unit == 0:  # the heads share the starts, and nobody reads them while tokens are appended
        set_chunk_start(index.blocks, index.offsets, chunk + 1, header.indexed_end)
    ctx.bytes_touched += length * ctx.head_dim * 2 + 8 * ctx.head_dim


def forget_graft(arrays: State) -> None:
    """There is no last graft to take back."""
    arrays["last_graft"]["kv_len"] = 0


def take_back_graft(arrays: State, kv_len: int) -> None:
    """The index as before the last graft, where that came after `kv_len` tokens.

    What is behind the last chunk, in starts and links, is written again with the next one.
    """
    header, last_graft = arrays["header"], arrays["last_graft"][:, 0]
    num_units = int(header["num_units"][0])
    for h in np.flatnonzero(last_graft["kv_len"] > kv_len):
        unit, cluster, link = (int(last_graft[name][h]) for name in ("unit", "cluster", "link"))
        changed = [unit, num_units + cluster]
        arrays["rows"][h, changed] = arrays["old_rows"][h].reshape(2, -1)
        arrays["scales"][h][:, changed] = arrays["old_scales"][h].reshape(2, 3).T
        arrays["ranges"][h, num_units + 1 + unit] -= 1
        header[h] = arrays["old_header"][h, 0]
        arrays["links"][h, cluster] = link & 0xFFFF
        if header["has_high_links"][h]:
            arrays["links_high"][h, cluster] = link >> 16
    forget_graft(arrays)
