"""Device functions for rows of keys and values: numbers, or int8 with scales (`row_format`).

A kernel gets ROW_ITEMS, the elements of a row, beside HEAD_DIM: they differ where rows are int8,
which are converted when they are loaded, and made when they are stored. What only copies rows needs
not know which they are.
"""

from __future__ import annotations

from gpu_ops.launch import jit, tl


@jit
def elements_of(first: tl.tensor, offsets: tl.tensor, ROW_ITEMS: tl.constexpr) -> tl.tensor:
    """Pointers first + offsets [rows, elements], and what the compiler does not know of addresses
    from a page table: rows are whole vectors of so many bytes."""
    pointers = first + offsets
    if ROW_ITEMS % 16 == 0:
        return tl.multiple_of(pointers, (16, 16))
    elif ROW_ITEMS % 8 == 0:
        return tl.multiple_of(pointers, (8, 8))
    elif ROW_ITEMS % 4 == 0:
        return tl.multiple_of(pointers, (4, 4))
    else:
        return tl.multiple_of(pointers, (2, 2))


@jit
def load_rows(
    rows: tl.tensor,  # pointer to the first of rows that follow each other
    t: tl.tensor,  # [BLOCK_T], which of them
    exists: tl.tensor,  # [BLOCK_T]; others are 0
    dtype: tl.constexpr,  # of the result
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr = 0,  # else a multiple of 64
) -> tl.tensor:
    """The numbers of rows from FIRST on: [BLOCK_T, BLOCK_D], 0 from HEAD_DIM on."""
    d = FIRST + tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (d < HEAD_DIM)[None, :]
    elements = elements_of(rows, t[:, None] * ROW_ITEMS + d[None, :], ROW_ITEMS)
    if ROW_ITEMS == HEAD_DIM:
        return tl.load(elements, inside, other=0.0)
    else:
        codes = tl.load(elements, inside, other=0)
        scales = (rows + (HEAD_DIM + 31) // 32 * 32).to(tl.pointer_type(tl.float16))
        of_row = scales + t * (ROW_ITEMS // 2)
        if HEAD_DIM <= 64:
            scale = tl.load(of_row, exists, other=0.0)
            return (codes.to(tl.float32) * scale.to(tl.float32)[:, None]).to(dtype)
        else:
            GROUPS: tl.constexpr = BLOCK_D // 64
            group = FIRST // 64 + tl.arange(0, GROUPS)
            there = exists[:, None] & (group * 64 < HEAD_DIM)[None, :]
            scale = tl.load(of_row[:, None] + group[None, :], there, other=0.0).to(tl.float32)
            grouped = tl.reshape(codes, [t.shape[0], GROUPS, 64]).to(tl.float32)
            return tl.reshape((grouped * scale[:, :, None]).to(dtype), [t.shape[0], BLOCK_D])


@jit
def load_codes(
    rows: tl.tensor,
    t: tl.tensor,
    exists: tl.tensor,  # others have any codes, and scales of 0
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """What int8 rows have in memory, all of which is read, by groups of 64 dimensions, or of
    BLOCK_D if that is less: codes [BLOCK_T, 64] and scales float16 [BLOCK_T]."""
    WIDTH: tl.constexpr = min(BLOCK_D, 64)
    scales_at = (rows + (HEAD_DIM + 31) // 32 * 32).to(tl.pointer_type(tl.float16))
    scales_at += t * (ROW_ITEMS // 2)
    codes, scales = (), ()
    for group in tl.static_range(BLOCK_D // WIDTH):
        d = group * 64 + tl.arange(0, WIDTH)
        elements = elements_of(rows, t[:, None] * ROW_ITEMS + d[None, :], ROW_ITEMS)
        if HEAD_DIM % WIDTH == 0 and group * 64 < HEAD_DIM:
            of_group = tl.load(elements)
        else:
            inside = (t >= 0)[:, None] & (d < HEAD_DIM)[None, :]
            of_group = tl.load(elements, inside, other=0)
        codes += (of_group,)  # type: ignore[assignment]
        there = exists & (group * 64 < HEAD_DIM)
        scales += (tl.load(scales_at + group, there, other=0.0),)  # type: ignore[assignment]
    return codes, scales


@jit
def code_numbers(codes: tl.tensor, dtype: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Codes as numbers of a dtype, without scales: exact in each.

    PACKED: four bytes in a register, which the interpreter has not. A bfloat16 whose high byte is
    0x43 is 128 or 256 by its bit 7, plus the bits below: their difference is the code.
    """
    if PACKED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, one, all, sign;
            mov.b32 one, 0x3f803f80;
            prmt.b32 x, $2, 0x43, 0x4140; prmt.b32 y, $2, 0x43, 0x4342;
            and.b32 all, x, 0xff7fff7f; and.b32 sign, x, 0xff80ff80; xor.b32 sign, sign, 0x80008000;
            fma.rn.bf16x2 $0, all, one, sign;
            and.b32 all, y, 0xff7fff7f; and.b32 sign, y, 0xff80ff80; xor.b32 sign, sign, 0x80008000;
            fma.rn.bf16x2 $1, all, one, sign;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    else:
        return codes.to(tl.float32).to(dtype)


@jit
def load_row(
    row: tl.tensor,  # pointer
    d: tl.tensor,  # which of its numbers
    inside: tl.tensor,  # whether to load each; others are 0
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
) -> tl.tensor:
    """float32: numbers of one row."""
    x = tl.load(row + d, inside, other=0).to(tl.float32)
    if ROW_ITEMS == HEAD_DIM:
        return x
    else:
        scales = (row + (HEAD_DIM + 31) // 32 * 32).to(tl.pointer_type(tl.float16))
        return x * tl.load(scales + d // 64, inside, other=0.0).to(tl.float32)


@jit
def store_row(
    row: tl.tensor,  # pointer
    low: tl.tensor,  # a row's two halves
    high: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least HEAD_DIM // 2
) -> None:
    """Writes a row, as `write_int8` does where it is int8."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    if ROW_ITEMS == HEAD_DIM:
        # The compiler knows nothing of the address; half a row is whole 16-byte vectors.
        row = tl.multiple_of(row + d, 16)
        tl.store(row, low, mask=inside)
        tl.store(row + HALF, high, mask=inside)
    else:
        WIDTH: tl.constexpr = (HEAD_DIM + 31) // 32 * 32
        low32 = tl.where(inside, low.to(tl.float32), 0.0)
        high32 = tl.where(inside, high.to(tl.float32), 0.0)
        low_inverse, high_inverse = tl.zeros_like(low32), tl.zeros_like(high32)
        scales = (row + WIDTH).to(tl.pointer_type(tl.float16))
        for group in tl.static_range((HEAD_DIM + 63) // 64):
            in_low, in_high = d // 64 == group, (d + HALF) // 64 == group
            x, y = tl.where(in_low, low32, 0.0), tl.where(in_high, high32, 0.0)
            largest = tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(y), 0))
            # A maximum passes over NaN: what is not finite makes the sum NaN, and so the scale.
            largest += tl.sum(x * 0.0, 0) + tl.sum(y * 0.0, 0)
            scale = tl.div_rn(largest, tl.full([], 127.0, tl.float32)).to(tl.float16)
            divisor = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
            inverse = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
            inverse = tl.where(scale == 0.0, 0.0, inverse)
            low_inverse = tl.where(in_low, inverse, low_inverse)
            high_inverse = tl.where(in_high, inverse, high_inverse)
            tl.store(scales + group, scale)
        tl.store(row + d, _code_of(low32 * low_inverse), mask=inside)
        tl.store(row + HALF + d, _code_of(high32 * high_inverse), mask=inside)
        if WIDTH > HEAD_DIM:
            tl.store(row + HEAD_DIM + tl.arange(0, 16), tl.zeros([16], tl.int8))


@jit
def _code_of(x: tl.tensor) -> tl.tensor:
    """The nearest whole number, of two the even one: as the sum with 1.5 * 2**23 is rounded."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)
