"""LycheeCluster's `prepare`: brings into the cache what the next search is likely to read.

A layer's index was last read a whole step ago, so that it comes from memory. While others compute
the query there is time to ask for the coarse units, for the chunks of those units that the last
search opened (neighbouring queries open about the same), and for the order of chunks.
"""

from __future__ import annotations

from typing import Any

from offload.policies.lychee_cluster.chunks import BLOCK_SHIFT
from offload.policies.lychee_cluster.layout import (
    UNITS_LENGTH,
    read_state,
)
from offload.policies.lychee_cluster.search import prefetch_unit
from offload.policies.lychee_cluster.views import (
    ENDS,
    FOUND,
    HEADER_BYTES,
    OPENED,
    index_of,
    scratch_of,
)
from offload.selection.callback import callback, prefetch, read_context, view_int32

_MOST_BYTES = 1 << 20  # for all heads that a worker prepares: half of a second-level cache


@callback
def prepare(pointer: Any) -> None:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    prefetch(state.header + HEADER_BYTES * ctx.unit, HEADER_BYTES)
    index = index_of(ctx)
    header = index.header
    scratch = scratch_of(ctx, header)
    prefetch(scratch.units, 4 * UNITS_LENGTH)
    num_units, num_chunks = header.num_units, header.num_chunks
    capacity = header.capacity_chunks
    num_rows = num_units + capacity
    prefetch(state.rows + ctx.unit * num_rows * ctx.head_dim, num_units * ctx.head_dim)
    for kind in range(2):
        prefetch(state.scales + 2 * (2 * ctx.unit + kind) * num_rows, 2 * num_units)
    prefetch(state.ranges + 4 * ctx.unit * (num_units + 1), 4 * num_units)
    units = view_int32(scratch.units, UNITS_LENGTH)
    opened, found = units[OPENED], units[FOUND]
    # What it writes to: it would wait for that as well.
    ranked = max(num_units, units[ENDS + opened - 1] if opened > 0 else 0)
    prefetch(scratch.scores, 4 * ranked)
    prefetch(scratch.picked, 4 * (ranked >> 2))
    prefetch(scratch.candidates, 4 * found)
    prefetch(scratch.flags.ctypes.data, 8 * len(scratch.flags))
    asked = num_units * (ctx.head_dim + 8) + 5 * ranked + 4 * found
    most = _MOST_BYTES // max(1, ctx.prepared_together)
    for i in range(opened if ctx.may_defer < 2 else 0):  # else others will read them, too
        if asked > most:
            return
        asked += prefetch_unit(ctx, index, units[i])
    # Which chunks there will be is not known: all of the order and starts, where they are small.
    lists = (2 + header.has_high_order) * num_chunks + num_chunks + (num_chunks >> 2)
    if asked + lists > most:
        return
    at = ctx.unit * capacity
    prefetch(state.order + 2 * at, 2 * num_chunks)
    if header.has_high_order > 0:
        prefetch(state.order_high + at, num_chunks)
    prefetch(state.blocks, 4 * (num_chunks >> BLOCK_SHIFT) + 4)
    prefetch(state.offsets, num_chunks + 1)
