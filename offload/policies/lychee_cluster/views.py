"""The arrays of LycheeCluster's index and its scratch, as callbacks see them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic

from offload.policies.callback import _cast, view_int32, view_uint8
from offload.policies.lychee_cluster.chunks import BLOCK, MAX_CHUNK_TOKENS
from offload.policies.lychee_cluster.index import (
    CANDIDATE_CAPACITY,
    CAPACITY_CHUNKS,
    HAS_HIGH_LINKS,
    HEADER,
    HEADER_COLUMNS,
    LAST_GRAFT_COLUMNS,
    LINKS,
    LINKS_HIGH,
    NUM_CLUSTERS,
    NUM_UNITS,
    RANGES,
    ROWS,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    STARTS,
)

MAX_UNITS = 64
# Of the scratch `units`, int32: the units that the last search opened, where the clusters of each
# end in its scores, then these. What was opened and how many candidates that gave stays until the
# next search: `prepare` reads it.
ENDS, PARTIAL = MAX_UNITS, 2 * MAX_UNITS
OPENED, FOUND, NEAR = PARTIAL + 2, PARTIAL + 3, PARTIAL + 4
UNITS_LENGTH = 256

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
    address = ctx.arrays[HEADER] + 8 * HEADER_COLUMNS * ctx.unit
    return carray(_as_int64(address), HEADER_COLUMNS)


@numba.njit(cache=True)
def index_of(ctx: Any) -> Any:
    """header, rows, scales, ranges, block starts, offsets, links, high links of ctx.unit."""
    header = header_of(ctx)
    num_rows = header[NUM_UNITS] + header[NUM_CLUSTERS]
    capacity = header[CAPACITY_CHUNKS]
    num_links = header[NUM_CLUSTERS] + capacity
    num_ranges = 2 * header[NUM_UNITS] + 1
    num_blocks = capacity // BLOCK + 1
    rows = carray(
        _as_int8(ctx.arrays[ROWS] + ctx.unit * num_rows * ctx.head_dim), (num_rows, ctx.head_dim)
    )
    scales = carray(_as_uint16(ctx.arrays[SCALES] + ctx.unit * num_rows * 6), (3, num_rows))
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
def scratch_of(ctx: Any, header: Any) -> Any:
    """flags uint64, and addresses: query, keys, centroids, scores, candidates, picked, units."""
    base = ctx.arrays[SCRATCH] + ctx.unit * header[SCRATCH_BYTES]
    num_words = header[CAPACITY_CHUNKS] // 64 + 1
    query = base + 8 * num_words
    keys = query + 4 * ctx.head_dim
    centroids = keys + 4 * ctx.head_dim * MAX_CHUNK_TOKENS
    scores = centroids + 8 * ctx.head_dim
    candidates = scores + 4 * max(header[NUM_CLUSTERS], MAX_UNITS)
    picked = candidates + 4 * (header[CANDIDATE_CAPACITY] + MAX_CHUNK_TOKENS)
    units = picked + 4 * header[NUM_CLUSTERS]
    flags = carray(_as_uint64(base), num_words)
    return flags, query, keys, centroids, scores, candidates, picked, units


@numba.njit(cache=True)
def last_graft_of(ctx: Any, header: Any) -> Any:
    """Numbers int64 [LAST_GRAFT_COLUMNS] and rows int8 [2, head_dim] of what it changed."""
    size = (8 * LAST_GRAFT_COLUMNS + 2 * ctx.head_dim + 63) // 64 * 64
    base = ctx.arrays[SCRATCH] + (ctx.unit + 1) * header[SCRATCH_BYTES] - size
    rows = carray(_as_int8(base + 8 * LAST_GRAFT_COLUMNS), (2, ctx.head_dim))
    return carray(_as_int64(base), LAST_GRAFT_COLUMNS), rows


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
