"""Grafting: LycheeCluster takes the oldest tokens of its buffer into the index, chunk by chunk.

A chunk becomes a group of its own, behind those that are in units, until the arrays grow (`units`).

In the paper's index (arXiv 2603.08453, section 4.4, lazy update) it goes to the nearest fine
cluster, found through the coarse units; centroids are moving averages, radii only grow, by what the
new chunk and the move of the centroid ask for.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.policies.lychee_cluster.chunks import chunk_length, set_chunk_start
from offload.policies.lychee_cluster.layout import (
    CENTRE_STEPS,
    LAST_GRAFT,
    WIDTH_STEPS,
    read_last_graft,
    read_state,
)
from offload.policies.lychee_cluster.ordering import take_best
from offload.policies.lychee_cluster.search import read_numbers
from offload.policies.lychee_cluster.views import (
    HEADER_BYTES,
    NEAR,
    RANGES,
    bfloat16_bits_up,
    from_bfloat16,
    header_of,
    index_of,
    link_of,
    scratch_of,
    set_link,
)
from offload.selection.callback import (
    callback,
    load_keys,
    rank_rows,
    read_context,
    view_float32,
    view_int32,
    view_uint8,
    view_uint16,
    view_uint64,
)
from offload.selection.compiled import cached_njit
from offload.selection.layer_state import State

LAST_GRAFT_BYTES = LAST_GRAFT.itemsize
_GRAFT_UNITS = 3  # coarse units in which a new chunk looks for its cluster
_MAX_COUNT = 255  # members that weigh in a moving average


@cached_njit()
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


@cached_njit()
def mean_key(keys: Any, length: int, out: Any) -> float:
    """Writes the mean of `length` keys; its norm."""
    width = len(out)
    squares = 0.0
    for d in range(width):
        total = np.float32(0)
        for i in range(length):
            total += keys[i * width + d]
        out[d] = total / np.float32(length)
        squares += out[d] * out[d]
    return float(np.sqrt(squares))


@cached_njit()
def pack_box(centre: Any, widths: Any, row: Any, scale: Any) -> None:
    """Bytes of a box and their scales, as `index.pack_boxes` makes them."""
    widest, furthest = np.float32(0), np.float32(0)
    for d in range(len(row)):
        widest, furthest = max(widest, widths[d]), max(furthest, abs(centre[d]))
    scale[0] = bfloat16_bits_up(furthest / np.float32(CENTRE_STEPS))
    scale[1] = bfloat16_bits_up(widest / np.float32(WIDTH_STEPS))
    step, width_step = from_bfloat16(scale[0]), from_bfloat16(scale[1])
    for d in range(len(row)):
        low_half = np.int64(np.rint(centre[d] / step)) if step > 0 else 0
        high_half = np.int64(np.rint(widths[d] / width_step)) if width_step > 0 else 0
        row[d] = np.int8((low_half & 15) | (high_half << 4))


@cached_njit()
def write_box(keys: Any, length: int, centre: Any, row: Any, scale: Any) -> None:
    """The box of `length` keys.

    Args:
        centre: the mean of the keys; the box's centre when it is done.
    """
    width = len(centre)
    widths = np.empty(width, np.float32)
    for d in range(width):
        low = high = keys[d]
        for i in range(1, length):
            low, high = min(low, keys[i * width + d]), max(high, keys[i * width + d])
        widths[d] = np.float32(0.5) * (high - low)
        centre[d] = np.float32(0.5) * centre[d] + np.float32(0.25) * (low + high)
    pack_box(centre, widths, row, scale)


@numba.njit(inline="always")
def _note_header(ctx: Any, cluster: Any) -> Any:
    """Note the header as it is before a graft, of one that joins `cluster` or none; the note."""
    state = read_state(ctx.arrays)
    last = read_last_graft(state.last_graft + LAST_GRAFT_BYTES * ctx.unit)
    last.kv_len, last.cluster = ctx.kv_len, cluster
    words = HEADER_BYTES // 8
    view_uint64(state.old_header, words, ctx.unit)[:] = view_uint64(state.header, words, ctx.unit)
    return last


@cached_njit()
def _note_before(ctx: Any, index: Any, unit: Any, cluster: Any) -> None:
    """Note what grafting onto a cluster will change (`take_back_graft`)."""
    state, header = read_state(ctx.arrays), index.header
    last = _note_header(ctx, cluster)
    last.unit, last.link = unit, link_of(index.links, index.high, cluster)
    old_scales = view_uint16(state.old_scales, 4, ctx.unit)
    old_rows = view_uint8(state.old_rows, 2 * ctx.head_dim, ctx.unit)
    for i in range(2):
        row = unit if i == 0 else header.num_units + cluster
        for d in range(ctx.head_dim):
            old_rows[i * ctx.head_dim + d] = np.uint8(index.rows[row, d])
        for kind in range(2):
            old_scales[2 * i + kind] = index.scales[kind, row]


@numba.njit
def _graft(pointer: Any, ctx: Any, length: int) -> None:
    """Put the next `length` tokens into the index: a chunk of the nearest cluster, or a group."""
    index = index_of(ctx)
    header = index.header
    scratch = scratch_of(ctx, header)
    load_keys(pointer, ctx.load_keys, header.indexed_end, length, scratch.keys)
    mean = view_float32(scratch.query, ctx.head_dim)
    keys = view_float32(scratch.keys, length * ctx.head_dim)
    norm = mean_key(keys, length, mean)
    chunk = header.num_chunks
    if header.paper:
        if norm > 0:
            mean *= np.float32(1 / norm)
        group = _join_nearest(pointer, ctx, index, scratch)
    else:
        _note_header(ctx, -1)
        group = header.num_groups
        row = header.num_units + group
        header.num_groups += 1
        write_box(keys, length, mean, index.rows[row], index.scales[:, row])
        set_link(index.links, index.high, group, 0)
    newest = link_of(index.links, index.high, group)
    set_link(index.links, index.high, header.capacity_groups + chunk, newest)
    set_link(index.links, index.high, group, chunk + 1)
    header.num_chunks += 1
    header.indexed_end += length
    if ctx.unit == 0:  # the heads share the starts, and they are not read while tokens are appended
        set_chunk_start(index.blocks, index.offsets, chunk + 1, header.indexed_end)
    ctx.bytes_touched += length * ctx.head_dim * 2 + 8 * ctx.head_dim


@numba.njit
def _rank_centroids(pointer: Any, ctx: Any, index: Any, scratch: Any, first: int, n: int) -> None:
    """q·mu of rows `first` on, for the chunk key in `scratch.query`, to the scores."""
    state, num_rows = read_state(ctx.arrays), len(index.rows)
    ranges = view_int32(scratch.units + 4 * RANGES, 2)
    ranges[0], ranges[1] = first, first + n
    rows = state.rows + ctx.unit * num_rows * ctx.head_dim
    scales = state.scales + 4 * ctx.unit * num_rows
    of_rows = (scratch.query, 1, rows, scales, np.int64(0), np.float32(0), np.int64(0))
    rank_rows(pointer, ctx.rank_rows, (*of_rows, scratch.units + 4 * RANGES, 1, scratch.scores))


@numba.njit
def _join_nearest(pointer: Any, ctx: Any, index: Any, scratch: Any) -> int:
    """Move the cluster nearest to the chunk key in `scratch.query`, and its unit; the cluster."""
    header, rows, scales, ranges = index.header, index.rows, index.scales, index.ranges
    num_units = header.num_units
    scores = view_float32(scratch.scores, max(header.num_groups, num_units))
    point = view_float32(scratch.query, ctx.head_dim)
    _rank_centroids(pointer, ctx, index, scratch, 0, num_units)
    near = view_int32(scratch.units + 4 * NEAR, _GRAFT_UNITS)
    kept = min(_GRAFT_UNITS, num_units)
    for i in range(kept):
        near[i] = max(0, take_best(scores, num_units))
    unit, cluster, largest = 0, 0, -np.inf
    for i in range(kept):
        first = ranges[near[i]]
        n = ranges[near[i] + 1] - first
        _rank_centroids(pointer, ctx, index, scratch, num_units + first, n)
        for j in range(n):
            if scores[j] > largest:
                unit, cluster, largest = near[i], first + j, scores[j]
    _note_before(ctx, index, unit, cluster)
    count = 0
    link = link_of(index.links, index.high, cluster)
    while link > 0 and count < _MAX_COUNT:
        count += 1
        link = link_of(index.links, index.high, header.capacity_groups + link - 1)
    old = view_float32(scratch.centroids, ctx.head_dim)
    new = view_float32(scratch.centroids, ctx.head_dim, 1)
    row = num_units + cluster
    _move_centroid(rows[row], scales[:, row], count, point, old, new)
    _move_centroid(rows[unit], scales[:, unit], ranges[num_units + 1 + unit], point, old, new)
    ranges[num_units + 1 + unit] += 1
    return int(cluster)


def forget_graft(arrays: State) -> None:
    """There is no last graft to take back."""
    arrays["last_graft"]["kv_len"] = 0


def take_back_graft(arrays: State, kv_len: int) -> None:
    """The index as before the last graft, where that came after `kv_len` tokens.

    What is behind the last chunk, in starts, links and rows, is written again with the next one.
    """
    header, last_graft = arrays["header"], arrays["last_graft"][:, 0]
    num_units = int(header["num_units"][0])
    for h in np.flatnonzero(last_graft["kv_len"] > kv_len):
        unit, cluster, link = (int(last_graft[name][h]) for name in ("unit", "cluster", "link"))
        header[h] = arrays["old_header"][h, 0]
        if cluster < 0:
            continue
        changed = [unit, num_units + cluster]
        arrays["rows"][h, changed] = arrays["old_rows"][h].reshape(2, -1)
        arrays["scales"][h][:, changed] = arrays["old_scales"][h].reshape(2, 2).T
        arrays["ranges"][h, num_units + 1 + unit] -= 1
        arrays["links"][h, cluster] = link & 0xFFFF
        if header["has_high_links"][h]:
            arrays["links_high"][h, cluster] = link >> 16
    forget_graft(arrays)
