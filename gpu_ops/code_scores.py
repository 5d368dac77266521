"""The first two kernels of `top_k_codes`: from a query and the codes of keys to scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.early_launch import await_inputs
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, tl
from gpu_ops.layout import Layout
from gpu_ops.score_bins import BINS, count_bins, score_bin
from gpu_ops.top_k_candidates import SIZES

# Tensor cores multiply rows of so many bytes by so many columns: both of several tokens, if a code
# or a group is smaller.
_MIN_BYTES = 32
_MIN_COLUMNS = 8
_MAX_TILE = 16384  # counts of a tile are in 16 bits
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
        segment_tile: tokens that a program that selects looks at together.
        found_tile: tokens of the k-th's bin that it holds.
        select_warps: of it.
    """

    tile_tokens: int
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 64
    segment_tile: int = 8192
    found_tile: int = 4096
    select_warps: int = 16

    def __post_init__(self) -> None:
        for name in ("tile_tokens", "segment_tile", "found_tile"):
            size = getattr(self, name)
            if not 16 <= size <= _MAX_TILE or size & (size - 1):
                raise ValueError(f"{name} must be a power of two in 16..{_MAX_TILE}, got {size}")

    @classmethod
    def default(cls, bits: int, head_dim: int, group_size: int) -> CodeLaunch:
        """Tiles as large as the registers hold without a spill; others were no faster."""
        if head_dim <= 128 and group_size <= 8:
            return cls(256)
        return cls(128, num_stages=4, max_registers=128)


@dataclass(frozen=True)
class CodeQuery:
    """Queries as the codes' scores need them; nothing that counts stays in it.

    Attributes:
        bytes: int8 [max_rows, H, dimensions of a byte, SHARE * BLOCK_G, SHARE * BLOCK_W], rotated,
            in steps; 0 where there is no dimension, from the start on. `code_query_kernel` says
            which is where.
        steps, offsets: float32 [max_rows, num_qo_heads], of one step, and what a score starts from.
        bins: int32 [max_rows, H, BINS], how many scores are in each.
        arrivals: int32 [max_rows, H], programs of a list that are done with their first part.
    """

    bytes: Tensor
    steps: Tensor
    offsets: Tensor
    bins: Tensor
    arrivals: Tensor

    @staticmethod
    def layout(
        max_rows: int, num_heads: int, num_qo_heads: int, group_size: int, head_dim: int, bits: int
    ) -> Layout:
        """For `num_heads` KV heads with codes."""
        dims, per_head = 8 // bits, (max_rows, num_qo_heads)
        share, group, width = code_blocks(group_size, head_dim, bits)
        return {
            "bytes": ((max_rows, num_heads, dims, share * group, share * width), torch.int8),
            "steps": (per_head, torch.float32),
            "offsets": (per_head, torch.float32),
            "bins": ((max_rows, num_heads, BINS), torch.int32),
            "arrivals": ((max_rows, num_heads), torch.int32),
        }


def code_blocks(group_size: int, head_dim: int, bits: int) -> tuple[int, int, int]:
    """Tokens that share a row of the tensor cores' operand, and powers of two that hold a group and
    the bytes of a code.
    """
    group, width = next_power_of_2(group_size), next_power_of_2(head_dim * bits // 8)
    return max(1, _MIN_COLUMNS // group, _MIN_BYTES // width), group, width


def code_page_bytes(num_heads: int, page_tokens: int, head_dim: int, bits: int) -> int:
    """Bytes of a page: codes uint8 [H][page_tokens][head_dim * bits / 8], then their scales,
    float32 [H][page_tokens]. A code's bytes are as offload/policies/sketch/codes.py makes them.
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
    bins: tl.tensor,
    arrivals: tl.tensor,
    sm_scale: tl.tensor,
    unit: tl.tensor,  # of levels
    NUM_HEADS: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows of the rotation that are loaded together
    BINS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per query head of the heads with codes, and row.

    As `spread_words` takes codes apart, four bytes at a time: by their place in a nibble, and of
    two bytes each. Its four bytes are the nibbles of these two. The tokens that share a row have
    columns of their own, which are 0 where the row is of another token.
    """
    await_inputs(EARLY)
    DIMS: tl.constexpr = 8 // BITS
    IN_NIBBLE: tl.constexpr = 4 // BITS
    COLUMNS: tl.constexpr = SHARE * BLOCK_G
    ROW: tl.constexpr = SHARE * BLOCK_W
    page_head, g = tl.program_id(0) // GROUP_SIZE, tl.program_id(0) % GROUP_SIZE
    row = tl.program_id(1).to(tl.int64)
    kv_head = tl.load(heads + page_head)
    target = row * NUM_HEADS + page_head
    e = tl.arange(0, BLOCK_D)
    mean = means + target * HEAD_DIM
    rotated = tl.zeros([BLOCK_D], tl.float32)
    offset = tl.zeros([BLOCK_R], tl.float32)
    for first in tl.static_range(0, HEAD_DIM, BLOCK_R):
        d = first + tl.arange(0, BLOCK_R)
        inside = d < HEAD_DIM
        both = inside[:, None] & (e < HEAD_DIM)[None, :]
        part = tl.load(rotation + d[:, None] * HEAD_DIM + e[None, :], mask=both, other=0.0)
        tl.debug_barrier()  # keeps what follows, which waits for the head, behind these loads
        head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE + g
        q = tl.load(query + head * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32) * sm_scale
        offset += q * tl.load(mean + d, mask=inside, other=0.0)
        rotated += tl.sum(q[:, None] * part, 0)
    largest = tl.max(tl.abs(rotated), 0)
    total = tl.sum(offset, 0) + tl.sum(rotated * 0.0, 0)  # no number, if an element is none
    in_range = (largest > 1e-30) & (largest < float("inf"))
    factor = tl.where(in_range, 127.0 / tl.maximum(largest, 1e-30), 0.0)
    element = tl.floor(tl.where(factor > 0.0, rotated * factor, 0.0) + 0.5).to(tl.int32)
    share = tl.arange(0, SHARE)[:, None]
    byte, nibble = share * BLOCK_W + (e // DIMS)[None, :], (e % DIMS // IN_NIBBLE)[None, :]
    part = (e % IN_NIBBLE * 2)[None, :] + byte % 4 // 2
    place = byte // 4 * 4 + byte % 2 * 2 + nibble
    column = out + target * DIMS * COLUMNS * ROW + (part * COLUMNS + share * BLOCK_G + g) * ROW
    elements = tl.broadcast_to(element.to(tl.int8)[None, :], [SHARE, BLOCK_D])
    tl.store(column + place, elements, mask=(e < HEAD_DIM)[None, :] & (share < SHARE))
    tl.store(steps + head, largest / 127.0 * unit)
    tl.store(offsets + head, total)
    if g == 0:  # what the next kernels count
        tl.store(bins + target * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(arrivals + target, 0)


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
    spots: tl.tensor,  # of the tile's first token
    rows: tl.tensor,  # [ROWS, 1]
    w: tl.tensor,  # [1, SHARE * BLOCK_W]
    HALF: tl.constexpr,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tensor:
    """What `spread_words` gives first or second, after PLACE shifts, one code at a time."""
    byte = w // 4 * 4 + 2 * HALF + w % 4 // 2
    at, inside = code_bytes(rows, byte, WIDTH, SHARE, BLOCK_W)
    codes = tl.load(spots + at, mask=inside, other=0)
    code = (codes >> (w % 2 * 4 + PLACE * BITS).to(tl.uint8)) & ((1 << BITS) - 1)
    code = code.to(tl.int8)
    return 2 * code - 1 if BITS == 1 else 7 * code - (code >> 1) - 10


@jit
def code_bytes(
    rows: tl.tensor,
    w: tl.tensor,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> tl.tensor:
    """Where byte w of a row of SHARE codes is, and whether there is one."""
    if WIDTH == BLOCK_W:
        at = rows * (SHARE * WIDTH) + w
    else:
        at = (rows * SHARE + w // BLOCK_W) * WIDTH + w % BLOCK_W
    return at, (w % BLOCK_W < WIDTH) & (rows >= 0)


@jit_for_any(*SIZES)
def score_codes_kernel(
    query: tl.tensor,
    steps: tl.tensor,
    offsets: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    scores: tl.tensor,
    bins: tl.tensor,
    max_pages: tl.tensor,
    score_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # bytes of a code
    ALIGNMENT: tl.constexpr,  # that divides it, or that of a row
    PAGE_TOKENS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,  # at least WIDTH
    BLOCK_T: tl.constexpr,  # divides PAGE_TOKENS and CHUNK: a tile lies in one page
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    PACKED: tl.constexpr,  # four bytes in a register; not for the interpreter
    COUNT: tl.constexpr,  # as `count_bins` takes them
    COUNT_CONSTRAINTS: tl.constexpr,
    COUNT_PACK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per chunk of tokens, head of the pages and row.

    Scores are less the largest offset of the group: so that bins tell apart what differs.
    """
    await_inputs(EARLY)
    DIMS: tl.constexpr = 8 // BITS
    COLUMNS: tl.constexpr = SHARE * BLOCK_G
    ROW: tl.constexpr = SHARE * BLOCK_W
    ROWS: tl.constexpr = BLOCK_T // SHARE
    chunk, page_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    begin = chunk * CHUNK
    # What does not depend on each other is loaded together, also by programs that have nothing to
    # do: what is not volatile the compiler moves to behind the return.
    position = tl.load(positions + row, volatile=True)
    kv_head = tl.load(heads + page_head, volatile=True)
    pages = page_table + row * max_pages
    page = tl.load(pages + begin // PAGE_TOKENS, volatile=True)  # later ones an iteration ahead
    t, w, r = tl.arange(0, BLOCK_T), tl.arange(0, ROW), tl.arange(0, ROWS)
    g, column = tl.arange(0, BLOCK_G), tl.arange(0, COLUMNS)
    of_group = query + (row * NUM_HEADS + page_head) * DIMS * COLUMNS * ROW
    of_group += column[None, :] * ROW + w[:, None]
    of_dims = ()
    for i in tl.static_range(DIMS):
        of_dims += (tl.load(of_group + i * COLUMNS * ROW),)  # type: ignore[assignment]
    kv_len = (position + 1).to(tl.int32)
    last = kv_len - recent_tokens
    if (kv_len <= budget_tokens) | (begin >= last):
        return

    first_head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE
    step = tl.load(steps + first_head + g, mask=g < GROUP_SIZE, other=0.0)
    offset = tl.load(offsets + first_head + g, mask=g < GROUP_SIZE, other=float("-inf"))
    offset -= tl.max(offset, 0)
    target = row * NUM_HEADS + page_head
    of_row = scores + target * score_stride
    at, inside = code_bytes(r[:, None], w[None, :], WIDTH, SHARE, BLOCK_W)
    SCALES: tl.constexpr = NUM_HEADS * PAGE_TOKENS * WIDTH
    in_page = page_head * PAGE_TOKENS + begin % PAGE_TOKENS
    scales_at = (page + SCALES).to(tl.pointer_type(tl.float32)) + in_page
    scale = tl.load(tl.multiple_of(scales_at + t, 16))
    end = tl.minimum(begin + CHUNK, last)
    for start in range(begin, end, BLOCK_T):
        # Of the last tile also what lies behind the last token, in its page.
        in_page = page_head * PAGE_TOKENS + start % PAGE_TOKENS
        spots = page.to(tl.pointer_type(tl.uint8)) + in_page * WIDTH
        following = start + BLOCK_T
        page = tl.load(pages + following // PAGE_TOKENS, mask=following < end, other=0)
        acc = tl.zeros([ROWS, COLUMNS], tl.int32)
        if PACKED:
            aligned = tl.multiple_of(spots + at, (ALIGNMENT, ALIGNMENT))
            is_whole: tl.constexpr = WIDTH == BLOCK_W
            codes = tl.load(aligned) if is_whole else tl.load(aligned, mask=inside, other=0)
            for i in tl.static_range(DIMS // 2):
                first_levels, levels = spread_words(codes, BITS)
                acc = tl.dot(first_levels, of_dims[2 * i], acc, out_dtype=tl.int32)
                acc = tl.dot(levels, of_dims[2 * i + 1], acc, out_dtype=tl.int32)
                codes = shift_words(codes, BITS)
        else:
            for i in tl.static_range(DIMS):
                levels = spread(
                    spots, r[:, None], w[None, :], i % 2, i // 2, BITS, WIDTH, SHARE, BLOCK_W
                )
                acc = tl.dot(levels, of_dims[i], acc, out_dtype=tl.int32)
        products = step[None, None, :] * tl.reshape(acc, [ROWS, SHARE, BLOCK_G]).to(tl.float32)
        of_group_all = tl.reshape(scale, [ROWS, SHARE])[:, :, None] * products
        best = tl.reshape(tl.max(of_group_all + offset[None, None, :], 2), [BLOCK_T])
        tl.store(of_row + start + t, best.to(tl.int32, bitcast=True))
        # Of the next tile, and not before the page is there: nothing waits for it here.
        in_page = page_head * PAGE_TOKENS + following % PAGE_TOKENS
        scales_at = (page + SCALES).to(tl.pointer_type(tl.float32)) + in_page
        more = (t >= 0) & (following < end)
        scale = tl.load(tl.multiple_of(scales_at + t, 16), mask=more, other=0.0)

    tl.debug_barrier()  # they are all there
    token = begin + tl.arange(0, CHUNK)
    present = (token >= sink_tokens) & (token < last)
    # Up to 15 tokens more than there are, so that loads are of whole vectors.
    score = tl.load(of_row + token, mask=token < tl.cdiv(last, 16) * 16, other=0)
    place = tl.where(present, score_bin(score.to(tl.float32, bitcast=True)), -1)
    count_bins(place, bins + target * BINS, COUNT, COUNT_CONSTRAINTS, COUNT_PACK)
