"""Counts of a list's scores by their size, from which it is known nearly which is the k-th.

A score becomes a key, an int32 in the same order: its bits, the last of which does not count. Bins
are of neighbouring keys, 16 to a power of two from 2**-12 to 2**20 and to -2**-12 to -2**20; what
lies between, or beyond, shares one. The last bin is that of infinity alone.
"""

from __future__ import annotations

from functools import cache

from gpu_ops.launch import jit, tl

BINS = 1024  # of a list
INFINITE_KEY = 0x7F800000


@jit
def score_key(score: tl.tensor) -> tl.tensor:
    """In the order of float32 scores, from 0 up; NaN and -infinity become infinity."""
    bits = score.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1) + 0x3FC00000
    return tl.where(tl.abs(score) < float("inf"), key, 0x7F800000)


@jit
def score_bin(score: tl.tensor) -> tl.tensor:
    """1 to BINS - 1, ascending."""
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    smallest: tl.constexpr = (127 - 12) << 4
    step = tl.minimum(tl.maximum((size >> 19) - smallest, 0), 510)  # by 4 bits of the fraction
    return tl.where(size < 0x7F800000, 512 + tl.where(bits < 0, -step, step), 1023)


@jit
def first_key(place: tl.tensor) -> tl.tensor:
    """The smallest key of a bin; of bin BINS, which is none, one above all keys."""
    smallest: tl.constexpr = (127 - 12) << 4
    step = place - 512 + tl.where(place > 512, smallest, -smallest - 1)
    key = (step << 18) + 0x3FC00000
    key = tl.where(place <= 2, 0, key)
    key = tl.where(place == 1023, 0x7F800000, key)
    return tl.where(place > 1023, 0x7FFFFFFF, key)


@jit
def bin_of_kth(of_bins: tl.tensor, k: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """The bin that the k-th largest is in; the last one for k = 0.

    Args:
        of_bins: how many are in each bin; at least k together.

    Returns:
        the bin; how many are in those above it, fewer than k.
    """
    reach = tl.cumsum(of_bins, 0, reverse=True)
    above = BINS - tl.arange(0, BINS)
    # Of the bins that fewer than k reach the first: as many reach it as no other of them.
    both = tl.where(reach < k, (reach.to(tl.int64) << 16) | above, 0)
    first = tl.max(both, 0)
    return BINS - 1 - (first & 0xFFFF).to(tl.int32), (first >> 16).to(tl.int32)


@cache
def counting(pack: int, num_warps: int) -> tuple[str, str] | None:
    """Assembly that counts `pack` bins a thread in shared memory and adds that to a list's counts.

    Triton's own histogram takes time in proportion to the number of bins for each element.

    Returns:
        it and its constraints: the bins, -1 for none, and as often the address of the counts. None
        where Triton would repeat elements, or threads are too many.
    """
    threads = 32 * num_warps
    if not pack or threads > BINS:
        return None
    offsets = range(0, 4 * BINS, 4 * threads)
    lines = [
        f".shared .align 16 .b32 counts[{BINS}];",
        ".reg .pred some; .reg .b32 base, mine, a; .reg .b64 target;",
        f"mov.u32 a, %tid.x; mul.wide.u32 target, a, 4; add.s64 target, target, ${2 * pack};",
        "mov.u32 base, counts; mad.lo.u32 mine, a, 4, base;",
        *(f"st.shared.u32 [mine+{offset}], 0;" for offset in offsets),
        "bar.sync 0;",
    ]
    for i in range(pack, 2 * pack):
        lines += [
            f"setp.ge.s32 some, ${i}, 0; mad.lo.u32 a, ${i}, 4, base;",
            "@some red.shared.add.u32 [a], 1;",
        ]
    lines.append("bar.sync 0;")
    for offset in offsets:
        lines += [
            f"ld.shared.u32 a, [mine+{offset}]; setp.ne.u32 some, a, 0;",
            f"@some red.relaxed.gpu.global.add.u32 [target+{offset}], a;",
        ]
    lines += [f"mov.b32 ${i}, 0;" for i in range(pack)]
    constraints = ",".join(["=r"] * pack + ["r"] * pack + ["l"] * pack + ["~{memory}"])
    return "{ " + "\n".join(lines) + " }", constraints


@jit
def count_bins(
    bins: tl.tensor,  # 1-d; -1 for none
    counts: tl.tensor,  # pointer to those of the list
    ASSEMBLY: tl.constexpr,  # both None, or of `counting`
    CONSTRAINTS: tl.constexpr,
    PACK: tl.constexpr,
) -> None:
    """Add them to the list's counts."""
    if ASSEMBLY is None:
        tl.atomic_add(
            counts + bins, tl.full(bins.shape, 1, tl.int32), mask=bins >= 0, sem="relaxed"
        )
    else:
        tl.inline_asm_elementwise(
            ASSEMBLY,
            CONSTRAINTS,
            [bins, counts.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=PACK,
        )
