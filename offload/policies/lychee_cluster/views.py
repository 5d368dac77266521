"""The arrays of LycheeCluster's index and its scratch, as callbacks see them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic

from offload.policies.lychee_cluster.chunks import BLOCK, MAX_CHUNK_TOKENS
from offload.policies.lychee_cluster.layout import (
    HEADER,
    MAX_UNITS,
    UNITS_LENGTH,
    read_header,
    read_state,
)
from offload.selection.callback import pointer_to, view_int32, view_uint8, view_uint16, view_uint64
from offload.selection.compiled import cached_njit

# Of `units`: the units that the last search opened (one past them: what was grafted), where the
# chunks of each end in its scores, and the first of them and their end among all places; then
# these. What was opened and how many candidates that gave stays until the next search: `prepare`
# reads it.
ENDS, RANGES, PARTIAL = MAX_UNITS + 1, 2 * (MAX_UNITS + 1), 4 * (MAX_UNITS + 1)
OPENED, FOUND = PARTIAL + 2, PARTIAL + 3

HEADER_BYTES = HEADER.itemsize
_as_int8 = pointer_to(types.int8)
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
    return read_header(read_state(ctx.arrays).header + HEADER_BYTES * ctx.unit)


class Index(NamedTuple):
    """The index of one KV head: `layout` says what is in the arrays."""

    header: Any
    rows: Any
    scales: Any
    ranges: Any
    blocks: Any
    offsets: Any
    order: Any
    high: Any  # order_high, or empty


class Scratch(NamedTuple):
    """A KV head's room to work in: flags as uint64 array, of the others the addresses."""

    flags: Any
    keys: Any
    mean: Any
    scores: Any
    candidates: Any
    picked: Any
    units: Any


@numba.njit(inline="always")
def index_of(ctx: Any) -> Any:
    """The `Index` of ctx.unit."""
    state, header = read_state(ctx.arrays), header_of(ctx)
    capacity = header.capacity_chunks
    num_rows = header.num_units + capacity
    rows = state.rows + ctx.unit * num_rows * ctx.head_dim
    return Index(
        header,
        carray(_as_int8(rows), (num_rows, ctx.head_dim)),
        carray(_as_uint16(state.scales + ctx.unit * num_rows * 4), (2, num_rows)),
        view_int32(state.ranges, header.num_units + 1, ctx.unit),
        view_int32(state.blocks, capacity // BLOCK + 1),
        view_uint8(state.offsets, capacity + 1),
        view_uint16(state.order, capacity, ctx.unit),
        view_uint8(state.order_high, capacity * header.has_high_order, ctx.unit),
    )


@cached_njit()
def scratch_of(ctx: Any, header: Any) -> Any:
    """The `Scratch` of ctx.unit."""
    state, unit, row_bytes = read_state(ctx.arrays), ctx.unit, 4 * ctx.head_dim
    longest = header.candidate_capacity + MAX_CHUNK_TOKENS
    return Scratch(
        view_uint64(state.flags, header.capacity_chunks // 64 + 1, unit),
        state.keys + unit * row_bytes * MAX_CHUNK_TOKENS,
        state.mean + unit * row_bytes,
        state.scores + unit * 4 * max(header.capacity_chunks, MAX_UNITS),
        state.candidates + unit * 4 * longest,
        state.picked + unit * 4 * max(header.capacity_chunks, header.candidate_capacity),
        state.units + unit * 4 * UNITS_LENGTH,
    )


@numba.njit(inline="always")
def chunk_at(order: Any, high: Any, place: Any) -> Any:
    if len(high) > 0:
        return np.int64(order[place]) | np.int64(high[place]) << 16
    return np.int64(order[place])


@numba.njit(inline="always")
def set_chunk_at(order: Any, high: Any, place: Any, chunk: Any) -> None:
    order[place] = chunk & 0xFFFF
    if len(high) > 0:
        high[place] = chunk >> 16
