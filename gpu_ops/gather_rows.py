"""Rows of host pages into a GPU buffer over PCIe: what attends to a selection without the CPU.

The kernel runs beside others that want the GPU's memory, and its own limit is the link. So it is a
few programs, fixed at capture, that walk through all tiles of rows and have many bytes in flight
each: PCIe answers after one or two microseconds, at 55 GB/s after some 100 KB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dims,
    check_head_dim,
    check_page_tokens,
    check_row_dtype,
    check_tensor,
)
from gpu_ops.cpu_pages import page_at
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.load_rows import elements_of


@dataclass(frozen=True)
class GatherLaunch:
    """How the kernel is spread over the GPU.

    By default it has few multiprocessors, each to itself: loads of one multiprocessor come back in
    order, so that whoever shares one with loads from the host waits for those, too. More programs
    fetch faster (50 GB/s instead of 45 on an H200) and slow down what runs beside them.

    Attributes:
        programs: in all, of whatever is gathered.
        tile_bytes: keys and values that a program has in flight at a time.
        num_warps: of a program.
    """

    programs: int = 4
    tile_bytes: int = 65536
    num_warps: int = 16

    def __post_init__(self) -> None:
        if self.programs < 1:
            raise ValueError(f"programs must be at least 1, got {self.programs}")
        if self.tile_bytes < 1:
            raise ValueError(f"tile_bytes must be at least 1, got {self.tile_bytes}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")

    def tile_tokens(self, row_bytes: int) -> int:
        """Tokens of a tile, of which a key and a value are loaded: a power of two."""
        # Rows of int8 are no whole vectors: each element has an address of its own in registers.
        tile_bytes = self.tile_bytes if row_bytes % 16 == 0 else self.tile_bytes // 8
        return next_power_of_2(max(1, tile_bytes // (2 * row_bytes)))


_LAUNCH = GatherLaunch()


@jit
def gathered_tokens(
    counts: tl.tensor,
    positions: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,  # one, or a block of them
    capacity: tl.tensor,
    FIXED_TOKENS: tl.constexpr,  # sinks and recent ones
    NUM_UNITS: tl.constexpr,
) -> tl.tensor:
    """Tokens of a head's selection that are neither sinks nor recent; 0 in an inactive row."""
    unit = kv_head if NUM_UNITS > 1 else kv_head * 0
    num_tokens = tl.load(counts + row * NUM_UNITS + unit) - FIXED_TOKENS
    num_tokens = tl.minimum(tl.maximum(num_tokens, 0), capacity)
    return tl.where(tl.load(positions + row) >= 0, num_tokens, 0)


@jit
def locate_tile(
    row: tl.tensor,
    tile: tl.tensor,
    selection: tl.tensor,
    counts: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    max_pages: tl.tensor,
    budget_tokens: tl.tensor,
    capacity: tl.tensor,
    NUM_HEADS: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    PARTS: tl.constexpr,  # 1: keys alone
    OUT_HEADS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    FIXED_TOKENS: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """The tile's tokens: (addresses of their keys, elements into `out`'s keys, which exist)."""
    # The same part of the context of all heads: pages hold the tokens of all, so that programs that
    # run together stay within few of them.
    slot, start = tile % NUM_HEADS, tile // NUM_HEADS * BLOCK_T
    kv_head = tl.load(heads + slot)
    num_tokens = gathered_tokens(counts, positions, row, kv_head, capacity, FIXED_TOKENS, NUM_UNITS)
    index = start + tl.arange(0, BLOCK_T)
    present = index < num_tokens
    unit = kv_head if NUM_UNITS > 1 else kv_head * 0
    chosen = selection + (row * NUM_UNITS + unit) * budget_tokens + SINK_TOKENS
    token = tl.load(chosen + index, mask=present, other=0)
    page = tl.load(page_table + row * max_pages + token // PAGE_TOKENS, mask=present, other=0)
    key_rows = kv_head * PAGE_TOKENS + token % PAGE_TOKENS
    target = ((row * PARTS * OUT_HEADS + FIRST_SLOT + slot) * capacity + index) * ROW_ITEMS
    return page + key_rows.to(tl.int64) * ROW_BYTES, target, present


@jit
def gather_rows_kernel(
    selection: tl.tensor,
    counts: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    max_pages: tl.tensor,
    budget_tokens: tl.tensor,
    capacity: tl.tensor,
    NUM_HEADS: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    PARTS: tl.constexpr,  # 1: keys alone
    OUT_HEADS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    FIXED_TOKENS: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Each program takes every tl.num_programs(0)-th tile, counted over all rows."""
    num_programs = tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    slots = tl.arange(0, BLOCK_H)
    in_batch = tl.load(heads + slots, mask=slots < NUM_HEADS, other=0)
    first = tl.program_id(0)
    sources = (selection, counts, page_table, positions, heads, max_pages, budget_tokens, capacity)
    for row_index in range(num_rows):
        row = tl.cast(row_index, tl.int64)
        most = tl.max(
            gathered_tokens(counts, positions, row, in_batch, capacity, FIXED_TOKENS, NUM_UNITS), 0
        )
        num_tiles = tl.cdiv(most, BLOCK_T)
        source, target, present = locate_tile(
            row,
            first,
            *sources,
            NUM_HEADS,
            FIRST_SLOT,
            PARTS,
            OUT_HEADS,
            NUM_UNITS,
            SINK_TOKENS,
            FIXED_TOKENS,
            ROW_ITEMS,
            ROW_BYTES,
            PAGE_TOKENS,
            BLOCK_T,
        )
        for tile in range(first, num_tiles * NUM_HEADS, num_programs):
            of_row = source.to(tl.pointer_type(out.dtype.element_ty))[:, None]
            keys = elements_of(of_row, d[None, :], ROW_ITEMS)
            inside = present[:, None] & (d < ROW_ITEMS)[None, :]
            # Past the L1, which has no use for rows that are read once.
            k = tl.load(keys, mask=inside, cache_modifier=".cg")
            v = k
            if PARTS > 1:
                of_row += NUM_KV_HEADS * PAGE_TOKENS * ROW_ITEMS
                values = elements_of(of_row, d[None, :], ROW_ITEMS)
                v = tl.load(values, mask=inside, cache_modifier=".cg")
            k_out = out + target[:, None] + d[None, :]
            # While these are under way, where the next ones are is looked up.
            source, target, present = locate_tile(
                row,
                tile + num_programs,
                *sources,
                NUM_HEADS,
                FIRST_SLOT,
                PARTS,
                OUT_HEADS,
                NUM_UNITS,
                SINK_TOKENS,
                FIXED_TOKENS,
                ROW_ITEMS,
                ROW_BYTES,
                PAGE_TOKENS,
                BLOCK_T,
            )
            tl.store(k_out, k, mask=inside)
            if PARTS > 1:
                tl.store(k_out + OUT_HEADS * capacity.to(tl.int64) * ROW_ITEMS, v, mask=inside)
        # Who had one tile more than others in this row starts later in the next.
        first = (first - num_tiles * NUM_HEADS % num_programs + num_programs) % num_programs


def gather_rows(
    selection: Tensor,
    counts: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    num_kv_heads: int,
    page_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    out: Tensor,
    first_slot: int = 0,
    launch: GatherLaunch = _LAUNCH,
) -> None:
    """Copy keys and values of selected tokens, but for sinks and recent ones, out of host pages.

    A unit's selection is [sink tokens, chosen tokens ascending, recent tokens]; the middle is
    gathered, [sink_tokens, count - recent_tokens). A count of at most sink_tokens + recent_tokens
    gathers nothing. What is beyond the gathered tokens in `out` stays as it is.

    Args:
        selection: int32 [n, num_units, budget_tokens], tokens. num_units is num_kv_heads, or 1 for
            a selection that all heads share.
        counts: int32 [n, num_units], at most budget_tokens.
        page_table: int64 [n, max_pages], addresses of pages of this layer in host memory that the
            GPU reaches (pinned or registered), each laid out [K|V][num_kv_heads][page_tokens]
            [row] in out's dtype and aligned to 16 bytes.
        positions: int64 [n], each row's last token; -1 for an inactive row, which gathers nothing.
        heads: int32 [num_heads], the KV heads to gather.
        page_tokens: a power of two.
        out: [n, 2, at least num_heads, capacity, row] with capacity = budget_tokens -
            sink_tokens - recent_tokens: keys and values, token i of the middle at i. Rows are of
            head_dim, or of int8 (`row_format`). [n, 1, ..]: pages have keys alone.
        first_slot: place in `out` of the first of `heads`; the others follow it.
        launch: how the kernel is spread over the GPU.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_row_dtype("out", out)
    device = out.device
    n, out_heads, capacity, row_items = check_gathered("out", out, device)
    num_heads = heads.numel()
    if not 0 <= first_slot <= first_slot + num_heads <= out_heads or num_heads < 1:
        raise ValueError(
            f"{num_heads} heads from slot {first_slot} do not lie in out's {out_heads}"
        )
    check_page_tokens(page_tokens)
    num_units = check_units(counts, num_kv_heads)
    budget_tokens = capacity + check_fixed(sink_tokens, recent_tokens)
    check_tensor("selection", selection, (n, num_units, budget_tokens), torch.int32, device)
    check_tensor("counts", counts, (n, num_units), torch.int32, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    operands = (selection, counts, page_table, positions, heads, out)
    if not runs_kernel(out):
        page_shape = (out.shape[1], num_kv_heads, page_tokens, row_items)
        return gather_rows_reference(*operands, page_shape, sink_tokens, recent_tokens, first_slot)
    row_bytes = row_items * out.element_size()
    if out.dtype == torch.int8:  # a copy of bytes would take a register for each
        out = out.view(torch.int32 if row_items % 4 == 0 else torch.int16)
        row_items = out.shape[-1]
    gather_rows_kernel[(launch.programs,)](
        *operands[:-1],
        out,
        n,
        page_table.shape[1],
        budget_tokens,
        capacity,
        num_heads,
        first_slot,
        out.shape[1],
        out_heads,
        num_units,
        num_kv_heads,
        sink_tokens,
        sink_tokens + recent_tokens,
        row_items,
        row_bytes,
        page_tokens,
        next_power_of_2(num_heads),
        launch.tile_tokens(row_bytes),
        next_power_of_2(row_items),
        num_warps=launch.num_warps,
    )


def gather_rows_reference(
    selection: Tensor,
    counts: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    out: Tensor,
    page_shape: tuple[int, int, int, int],
    sink_tokens: int,
    recent_tokens: int,
    first_slot: int,
) -> None:
    """`gather_rows` by torch; pages [*page_shape] are CPU memory."""
    page_tokens = page_shape[2]
    for row, position in enumerate(positions.tolist()):
        for slot, kv_head in enumerate(heads.tolist() if position >= 0 else (), first_slot):
            unit = kv_head if counts.shape[1] > 1 else 0
            count = min(int(counts[row, unit]), selection.shape[2])
            tokens = selection[row, unit, sink_tokens : max(sink_tokens, count - recent_tokens)]
            for i, token in enumerate(tokens.tolist()):
                page = page_at(int(page_table[row, token // page_tokens]), page_shape, out.dtype)
                out[row, :, slot, i] = page[:, kv_head, token % page_tokens]


def check_gathered(name: str, x: Tensor, device: torch.device) -> tuple[int, int, int, int]:
    """n, num_heads, capacity and elements of a row; ValueError unless they are gathered rows."""
    check_dims(name, x, "[n, 2, num_heads, capacity, row]")
    n, parts, num_heads, capacity, row_items = x.shape
    check_tensor(name, x, x.shape, x.dtype, device)
    if parts not in (1, 2):
        raise ValueError(f"{name} must have keys and values, or keys alone, got {list(x.shape)}")
    if x.dtype != torch.int8:
        check_head_dim(row_items)
    if min(num_heads, capacity) < 1:
        raise ValueError(f"{name} must have heads and room for tokens, got {list(x.shape)}")
    return n, num_heads, capacity, row_items


def check_units(counts: Tensor, num_kv_heads: int) -> int:
    """Selections of a row: of each KV head, or one of all; ValueError for another number."""
    if counts.dim() != 2 or counts.shape[1] not in (1, num_kv_heads):
        raise ValueError(
            f"counts must be [n, 1] or [n, num_kv_heads={num_kv_heads}], got {list(counts.shape)}"
        )
    return counts.shape[1]


def check_fixed(sink_tokens: int, recent_tokens: int) -> int:
    """Tokens of a selection that are not gathered; ValueError for negative ones."""
    if sink_tokens < 0 or recent_tokens < 0:
        raise ValueError(
            f"sink_tokens and recent_tokens must not be negative,"
            f" got {sink_tokens} and {recent_tokens}"
        )
    return sink_tokens + recent_tokens
