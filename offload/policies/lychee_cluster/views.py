"""The arrays of LycheeCluster's index and its scratch, as callbacks see them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic

from offload.policies.callback import pointer_to, view_int32, view_uint8, view_uint64
from offload.policies.lychee_cluster.chunks import BLOCK, MAX_CHUNK_TOKENS
from offload.policies.lychee_cluster.layout import (
    CANDIDATE_CAPACITY,
    CAPACITY_CHUNKS,
    HAS_HIGH_LINKS,
    HEADER_COLUMNS,
    LAST_GRAFT_COLUMNS,
    MAX_UNITS,
    NUM_CLUSTERS,
    NUM_UNITS,
    UNITS_LENGTH,
    read_state,
)

# Of `units`: the units that the last search opened, where the clusters of each
# end in its scores, then these. What was opened and how many candidates that gave stays until the
# next search: `prepare` reads it.
ENDS, PARTIAL = MAX_UNITS, 2 * MAX_UNITS
OPENED, FOUND, NEAR = PARTIAL + 2, PARTIAL + 3, PARTIAL + 4

_as_int8 = pointer_to(types.int8)
_as_int64 = pointer_to(types.int64)
_as_uint16 = pointer_to(types.uint16)


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


_float_of_bits = _bitcast(types.uint32, types.float32, ir.FloatType())
bits_of_float = _bitcast(types.float32, types.uint32, ir.IntType(32))


@numba.njit(inline="always")
def from_bfloat16(bits: Any) -> Any:
    return _float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@numba.njit(inline="always")
def bfloat16_bits_up(x: Any) -> Any:
    """Bits of the smallest bfloat16 >= x, for x >= 0."""
    bits = np.int64(bits_of_float(np.float32(x)))
    return np.uint16((bits + 0xFFFF) >> 16)


@numba.njit(inline="always")
def header_of(ctx: Any) -> Any:
    address = read_state(ctx.arrays).header + 8 * HEADER_COLUMNS * ctx.unit
    return carray(_as_int64(address), HEADER_COLUMNS)


@numba.njit(cache=True)
def index_of(ctx: Any) -> Any:
    """header, rows, scales, ranges, block starts, offsets, links, high links of ctx.unit."""
    state, header = read_state(ctx.arrays), header_of(ctx)
    num_rows = header[NUM_UNITS] + header[NUM_CLUSTERS]
    capacity = header[CAPACITY_CHUNKS]
    num_links = header[NUM_CLUSTERS] + capacity
    rows = carray(
        _as_int8(state.rows + ctx.unit * num_rows * ctx.head_dim), (num_rows, ctx.head_dim)
    )
    scales = carray(_as_uint16(state.scales + ctx.unit * num_rows * 6), (3, num_rows))
    ranges = view_int32(state.ranges, 2 * header[NUM_UNITS] + 1, ctx.unit)
    blocks = view_int32(state.blocks, capacity // BLOCK + 1)
    offsets = view_uint8(state.offsets, capacity + 1)
    links = carray(_as_uint16(state.links + ctx.unit * num_links * 2), num_links)
    high = view_uint8(state.links_high, num_links * header[HAS_HIGH_LINKS], ctx.unit)
    return header, rows, scales, ranges, blocks, offsets, links, high


@numba.njit(cache=True)
def scratch_of(ctx: Any, header: Any) -> Any:
    """flags uint64, and addresses: query, keys, centroids, scores, candidates, picked, units."""
    state, unit, row_bytes = read_state(ctx.arrays), ctx.unit, 4 * ctx.head_dim
    flags = view_uint64(state.flags, header[CAPACITY_CHUNKS] // 64 + 1, unit)
    query = state.query + unit * row_bytes
    keys = state.keys + unit * row_bytes * MAX_CHUNK_TOKENS
    centroids = state.centroids + unit * row_bytes * 2
    scores = state.scores + unit * 4 * max(header[NUM_CLUSTERS], MAX_UNITS)
    longest = header[CANDIDATE_CAPACITY] + MAX_CHUNK_TOKENS
    candidates = state.candidates + unit * 4 * longest
    picked = state.picked + unit * 4 * header[NUM_CLUSTERS]
    units = state.units + unit * 4 * UNITS_LENGTH
    return flags, query, keys, centroids, scores, candidates, picked, units


@numba.njit(cache=True)
def last_graft_of(ctx: Any) -> Any:
    """Numbers int64 [LAST_GRAFT_COLUMNS] and rows int8 [2, head_dim] of what it changed."""
    state = read_state(ctx.arrays)
    last = _as_int64(state.last_graft + ctx.unit * 8 * LAST_GRAFT_COLUMNS)
    rows = carray(_as_int8(state.old_rows + ctx.unit * 2 * ctx.head_dim), (2, ctx.head_dim))
    return carray(last, LAST_GRAFT_COLUMNS), rows


@numba.njit(inline="always")
def link_of(links: Any, high: Any, i: Any) -> Any:
    if len(high) > 0:
        return np.int64(links[i]) | np.int64(high[i]) << 16
    return np.int64(links[i])


@numba.njit(inline="always")
def set_link(links: Any, high: Any, i: Any, link: Any) -> None:
    links[i] = link & 0xFFFF
    if len(high) > 0:
        high[i] = link >> 16


@numba.njit(inline="always")
def step_of(header: Any, column: Any) -> Any:
    return _float_of_bits(np.uint32(header[column]))
