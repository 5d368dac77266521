"""The first two kernels of `top_k_codes`: from a query and the codes of keys to importance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.early_launch import await_inputs
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, tl
from gpu_ops.layout import Layout, allocate
from gpu_ops.top_k_candidates import SIZES, store_maxima

_MIN_BYTES = 32  # of codes that tensor cores multiply at once: shorter ones are padded
_MIN_GROUP = 8
PEAK = {1: 1, 2: 10}  # the outermost level in steps; the inner one of 2 bits is 3


@dataclass(frozen=True)
class CodeLaunch:
    """How codes are scored.

    Args:
        tile_tokens: that are loaded together, a power of two; a page may be smaller.
        num_warps: of a program.
        num_stages: of the loop over tiles; one tile less is in flight.
        max_registers: of a thread. With 64 a GPU of 132 multiprocessors runs the programs of eight
            heads and 128K tokens all at once.
    """

    tile_tokens: int
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 64

    def __post_init__(self) -> None:
        if self.tile_tokens < 16 or self.tile_tokens & (self.tile_tokens - 1):
            raise ValueError(
                f"tile_tokens must be a power of two of at least 16, got {self.tile_tokens}"
            )

    @classmethod
    def default(cls, bits: int, head_dim: int, group_size: int) -> CodeLaunch:
        """Tiles as large as the registers hold without a spill; not measured yet."""
        is_small = head_dim <= 128 and group_size <= _MIN_GROUP
        if is_small and bits == 2:
            return cls(256)
        return cls(128, num_stages=4, max_registers=64 if is_small else 128)


@dataclass(frozen=True)
class CodeQuery:
    """Queries as the codes' scores need them; nothing that counts stays in it.

    Attributes:
        bytes: int8 [max_rows, H, dimensions of a byte, BLOCK_G, BLOCK_W], rotated, in steps; 0
            where there is no dimension, from the start on. `code_query_kernel` says which is where.
        steps, offsets: float32 [max_rows, num_qo_heads], of one step, and what a score starts from.
    """

    bytes: Tensor
    steps: Tensor
    offsets: Tensor

    @staticmethod
    def layout(
        max_rows: int, num_heads: int, num_qo_heads: int, group_size: int, head_dim: int, bits: int
    ) -> Layout:
        """For `num_heads` KV heads with codes."""
        dims = 8 // bits
        padded = max(_MIN_GROUP, next_power_of_2(group_size))
        per_head = (max_rows, num_qo_heads)
        width = max(_MIN_BYTES, next_power_of_2(head_dim // dims))
        return {
            "bytes": ((max_rows, num_heads, dims, padded, width), torch.int8),
            "steps": (per_head, torch.float32),
            "offsets": (per_head, torch.float32),
        }

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_heads: int,
        num_qo_heads: int,
        group_size: int,
        head_dim: int,
        bits: int,
        device: torch.device | str,
    ) -> CodeQuery:
        """Buffers of `layout`."""
        layout = cls.layout(max_rows, num_heads, num_qo_heads, group_size, head_dim, bits)
        return cls(**allocate(layout, device))


def code_page_bytes(num_heads: int, page_tokens: int, head_dim: int, bits: int) -> int:
    """Of a page: codes uint8 [H][page_tokens][head_dim * bits / 8], then their scales, float32
    [H][page_tokens]. A code's bytes are as offload/policies/sketch/codes.py makes them.
    """
    return num_heads * page_tokens * (head_dim * bits // 8 + 4)


@jit
def code_query_kernel(
    query: tl.tensor,
    rotation: tl.tensor,
    means: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    steps: tl.tensor,
    offsets: tl.tensor,
    sm_scale: tl.tensor,
    unit: tl.tensor,  # of levels
    NUM_HEADS: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows of the rotation that are loaded together
    EARLY: tl.constexpr,
) -> None:
    """One program per query head of the heads with codes, and row.

    As `spread_words` takes codes apart, four bytes at a time: by their place in a nibble, and of
    two bytes each. Its four bytes are the nibbles of these two.
    """
    await_inputs(EARLY)
    DIMS: tl.constexpr = 8 // BITS
    IN_NIBBLE: tl.constexpr = 4 // BITS
    page_head, g = tl.program_id(0) // GROUP_SIZE, tl.program_id(0) % GROUP_SIZE
    row = tl.program_id(1).to(tl.int64)
    head = row * NUM_QO_HEADS + tl.load(heads + page_head) * GROUP_SIZE + g
    e = tl.arange(0, BLOCK_D)
    mean = means + (row * NUM_HEADS + page_head) * HEAD_DIM
    rotated = tl.zeros([BLOCK_D], tl.float32)
    offset = tl.zeros([BLOCK_R], tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_R):
        d = first + tl.arange(0, BLOCK_R)
        inside = d < HEAD_DIM
        q = tl.load(query + head * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32) * sm_scale
        offset += q * tl.load(mean + d, mask=inside, other=0.0)
        both = inside[:, None] & (e < HEAD_DIM)[None, :]
        part = tl.load(rotation + d[:, None] * HEAD_DIM + e[None, :], mask=both, other=0.0)
        rotated += tl.sum(q[:, None] * part, 0)
    largest = tl.max(tl.abs(rotated), 0)
    total = tl.sum(offset, 0) + tl.sum(rotated * 0.0, 0)  # no number, if an element is none
    in_range = (largest > 1e-30) & (largest < float("inf"))
    factor = tl.where(in_range, 127.0 / tl.maximum(largest, 1e-30), 0.0)
    element = tl.floor(tl.where(factor > 0.0, rotated * factor, 0.0) + 0.5).to(tl.int32)
    byte, nibble = e // DIMS, e % DIMS // IN_NIBBLE
    part = e % IN_NIBBLE * 2 + byte % 4 // 2
    place = byte // 4 * 4 + byte % 2 * 2 + nibble
    target = out + (row * NUM_HEADS + page_head) * DIMS * BLOCK_G * BLOCK_W
    target += (part * BLOCK_G + g) * BLOCK_W + place
    tl.store(target, element.to(tl.int8), mask=e < HEAD_DIM)
    tl.store(steps + head, largest / 127.0 * unit)
    tl.store(offsets + head, total)


@jit
def spread_words(codes: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The levels of the lowest dimension in each nibble: of a word's first two bytes, and others.

    A nibble of a selector picks a byte: 4 and a code is one of the second operand's.
    """
    if BITS == 1:  # -1, 1
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; lop3.b32 x, $2, 0x11111111, 0x44444444, 0xea;"
            " prmt.b32 $0, x, 0x000001ff, x; shr.b32 x, x, 16; prmt.b32 $1, x, 0x000001ff, x; }",
            "=r,=r,r",
            [codes],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(  # -10, -3, 3, 10
        "{ .reg .b32 x; lop3.b32 x, $2, 0x33333333, 0x44444444, 0xea;"
        " prmt.b32 $0, x, 0x0a03fdf6, x; shr.b32 x, x, 16; prmt.b32 $1, x, 0x0a03fdf6, x; }",
        "=r,=r,r",
        [codes],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@jit
def shift_words(codes: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The next dimension of each nibble comes to where `spread_words` looks."""
    asm: tl.constexpr = "shr.b32 $0, $1, 1;" if BITS == 1 else "shr.b32 $0, $1, 2;"
    return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.uint8, is_pure=True, pack=4)


@jit
def spread(
    spots: tl.tensor,  # of the tile's tokens, [BLOCK_T, 1]
    w: tl.tensor,
    HALF: tl.constexpr,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """What `spread_words` gives first or second, after PLACE shifts, one code at a time."""
    byte = w // 4 * 4 + 2 * HALF + w % 4 // 2
    codes = tl.load(spots + byte[None, :], mask=(byte < WIDTH)[None, :], other=0)
    code = (codes >> (w % 2 * 4 + PLACE * BITS).to(tl.uint8)[None, :]) & ((1 << BITS) - 1)
    code = code.to(tl.int8)
    return 2 * code - 1 if BITS == 1 else 7 * code - (code >> 1) - 10


@jit_for_any(*SIZES)
def score_codes_kernel(
    query: tl.tensor,
    steps: tl.tensor,
    offsets: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    importance: tl.tensor,
    maxima: tl.tensor,
    max_pages: tl.tensor,
    importance_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # bytes of a code
    ALIGNMENT: tl.constexpr,  # that divides it
    PAGE_TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,  # at least WIDTH
    BLOCK_T: tl.constexpr,  # divides PAGE_TOKENS and CHUNK: a tile lies in one page
    CHUNK: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    MAX_LEVEL: tl.constexpr,
    PACKED: tl.constexpr,  # four bytes in a register; not for the interpreter
    EARLY: tl.constexpr,
) -> None:
    """One program per chunk of tokens, head of the pages and row."""
    DIMS: tl.constexpr = 8 // BITS
    await_inputs(EARLY)
    chunk, page_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row)
    kv_head = tl.load(heads + page_head)
    kv_len = (position + 1).to(tl.int32)
    last = kv_len - recent_tokens
    begin = chunk * CHUNK
    if (kv_len <= budget_tokens) | (begin >= last):
        return

    pages = page_table + row * max_pages
    page = tl.load(pages + begin // PAGE_TOKENS)  # an iteration ahead, as in paged_attention
    t, w, g = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_G)
    of_group = query + (row * NUM_HEADS + page_head) * DIMS * BLOCK_G * BLOCK_W
    of_group += g[None, :] * BLOCK_W + w[:, None]
    of_dims = ()
    for i in tl.static_range(DIMS):
        of_dims += (tl.load(of_group + i * BLOCK_G * BLOCK_W),)  # type: ignore[assignment]
    first_head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE
    step = tl.load(steps + first_head + g, mask=g < GROUP_SIZE, other=0.0)
    offset = tl.load(offsets + first_head + g, mask=g < GROUP_SIZE, other=float("-inf"))
    target = row * NUM_HEADS + page_head
    of_row = importance + target * importance_stride
    written = tl.cdiv(last, 16) * 16  # so far whole vectors are read
    for start in range(begin, tl.minimum(begin + CHUNK, last), BLOCK_T):
        # Of the last tile also what lies behind the last token, in its page.
        in_page = page_head * PAGE_TOKENS + start % PAGE_TOKENS + t
        spots = page.to(tl.pointer_type(tl.uint8)) + in_page[:, None] * WIDTH
        scales_at = (page + NUM_HEADS * PAGE_TOKENS * WIDTH).to(tl.pointer_type(tl.float32))
        following = start + BLOCK_T
        page = tl.load(pages + following // PAGE_TOKENS, mask=following < last, other=0)
        scale = tl.load(tl.multiple_of(scales_at + in_page, 16))
        acc = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
        if PACKED:
            aligned = tl.multiple_of(spots + w[None, :], (ALIGNMENT, ALIGNMENT))
            if WIDTH == BLOCK_W:
                codes = tl.load(aligned)
            else:
                codes = tl.load(aligned, mask=(w < WIDTH)[None, :], other=0)
            for i in tl.static_range(DIMS // 2):
                first_levels, levels = spread_words(codes, BITS)
                acc = tl.dot(first_levels, of_dims[2 * i], acc, out_dtype=tl.int32)
                acc = tl.dot(levels, of_dims[2 * i + 1], acc, out_dtype=tl.int32)
                codes = shift_words(codes, BITS)
        else:
            for i in tl.static_range(DIMS):
                levels = spread(spots, w, i % 2, i // 2, BITS, WIDTH)
                acc = tl.dot(levels, of_dims[i], acc, out_dtype=tl.int32)
        scores = scale[:, None] * (step[None, :] * acc.to(tl.float32)) + offset[None, :]
        best = tl.max(scores, 1)
        best = tl.where(tl.abs(scale) < float("inf"), best, float("inf"))
        bits = best.to(tl.int32, bitcast=True)
        # In the order of the floats, from 0 up; infinity stays what it is.
        bits = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1) + 0x3FC00000
        bits = tl.where((start + t >= sink_tokens) & (start + t < last), bits, -1)
        tl.store(of_row + start + t, bits, mask=start + t < written)

    tl.debug_barrier()  # they are all there
    token = begin + tl.arange(0, CHUNK)
    bits = tl.load(of_row + token, mask=token < last, other=-1)
    store_maxima(bits, maxima + target * MAX_GROUPS, chunk, last, CHUNK, MAX_GROUPS, MAX_LEVEL)
