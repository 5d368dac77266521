"""Grafting: LycheeCluster takes the oldest tokens of its buffer into the index, chunk by chunk.

A chunk comes behind those that are in units, until the arrays grow (`units`).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.policies.lychee_cluster.chunks import chunk_length, set_chunk_start
from offload.policies.lychee_cluster.layout import (
    CENTRE_STEPS,
    WIDTH_STEPS,
    read_state,
)
from offload.policies.lychee_cluster.search import read_numbers
from offload.policies.lychee_cluster.views import (
    HEADER_BYTES,
    bfloat16_bits_up,
    from_bfloat16,
    header_of,
    index_of,
    scratch_of,
    set_chunk_at,
)
from offload.selection.callback import (
    callback,
    load_keys,
    read_context,
    view_float32,
    view_uint8,
    view_uint64,
)
from offload.selection.compiled import cached_njit
from offload.selection.layer_state import State


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
def mean_key(keys: Any, length: int, out: Any) -> None:
    """Writes the mean of `length` keys."""
    width = len(out)
    for d in range(width):
        total = np.float32(0)
        for i in range(length):
            total += keys[i * width + d]
        out[d] = total / np.float32(length)


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
def _note_header(ctx: Any) -> None:
    """Note the header as it is before a graft (`take_back_graft`)."""
    state = read_state(ctx.arrays)
    view_uint64(state.last_graft, 1, ctx.unit)[0] = ctx.kv_len
    words = HEADER_BYTES // 8
    old = view_uint64(state.old_header, words, ctx.unit)
    header = view_uint64(state.header, words, ctx.unit)
    for i in range(words):  # as a slice it took Numba seconds: the error of another shape
        old[i] = header[i]


@numba.njit
def _graft(pointer: Any, ctx: Any, length: int) -> None:
    """Put the next `length` tokens into the index: a chunk."""
    index = index_of(ctx)
    header = index.header
    scratch = scratch_of(ctx, header)
    load_keys(pointer, ctx.load_keys, header.indexed_end, length, scratch.keys)
    mean = view_float32(scratch.mean, ctx.head_dim)
    keys = view_float32(scratch.keys, length * ctx.head_dim)
    mean_key(keys, length, mean)
    _note_header(ctx)
    chunk = header.num_chunks
    row = header.num_units + chunk
    write_box(keys, length, mean, index.rows[row], index.scales[:, row])
    set_chunk_at(index.order, index.high, chunk, chunk)
    header.num_chunks += 1
    header.indexed_end += length
    if ctx.unit == 0:  # the heads share the starts, and they are not read while tokens are appended
        set_chunk_start(index.blocks, index.offsets, chunk + 1, header.indexed_end)
    ctx.bytes_touched += length * ctx.head_dim * 2 + 8 * ctx.head_dim


def forget_graft(arrays: State) -> None:
    """There is no last graft to take back."""
    arrays["last_graft"][:] = 0


def take_back_graft(arrays: State, kv_len: int) -> None:
    """The index as before the last graft, where that came after `kv_len` tokens.

    What is behind the last chunk, in starts, order and rows, is written again with the next one.
    """
    late = arrays["last_graft"][:, 0] > kv_len
    arrays["header"][late] = arrays["old_header"][late, 0]
    forget_graft(arrays)
