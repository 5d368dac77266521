"""Flash decoding over pages of KV on the GPU: what paged and retrieval attention share.

Every row's tokens are split into equal pieces, each attended to by one program per KV head, and a
second kernel merges the pieces. The grid is fixed when a CUDA graph is captured, so the number of
splits is too; how long they are is computed on the device from the row's position. All splits of
the longest row run at once on the whole GPU, whatever the lengths of the others.

Why a second launch and not the last program to arrive: with one KV head there are 264 pieces of
each of its query heads, half a megabyte that a single multiprocessor would read one after the other
(5 us and more), and that a launch reads on many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gpu_ops.early_launch import await_inputs, can_launch_early, early_option
from gpu_ops.launch import jit_for_any, next_power_of_2, tl
from gpu_ops.online_softmax import MIN_GROUP, load_query, score_tile, tile_tokens, weigh_tile
from gpu_ops.split_state import merge_states, split_length

PROGRAMS_PER_MULTIPROCESSOR = 2
# Rows of a batch fill the GPU together, so that their pieces need not be as small.
_MAX_TILES_PER_SPLIT = 8
_MERGE_PROGRAMS = 256  # that the merge has at least, by parts of a head's output
_MERGED_ELEMENTS = 4096  # of the pieces of a head, that a program has in registers at once


@dataclass(frozen=True)
class SplitLaunch:
    """How a split is computed.

    Args:
        tile_tokens: keys that are loaded together, a power of two of at least 16; a page may be
            smaller.
        num_warps: of a program.
        num_stages: of the loop over tiles; one tile less is in flight.
        merges_early: the merge is launched while the splits run, if the GPU can (`early_launch`).
    """

    tile_tokens: int
    num_warps: int = 4
    num_stages: int = 3
    merges_early: bool = True

    @classmethod
    def default(cls, head_dim: int, itemsize: int) -> SplitLaunch:
        """What two programs on each multiprocessor have the shared memory for."""
        return cls(tile_tokens(head_dim, itemsize))


@jit_for_any("min_tiles")
def paged_attention_kernel(
    query: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,  # the KV head of each head in a page; None: pages have all, in order
    partial_out: tl.tensor,
    partial_lse: tl.tensor,  # in base 2
    scores: tl.tensor,  # None, or of [row, head in a page, query head of the group, token]; base 2
    max_pages: tl.tensor,
    max_tokens: tl.tensor,  # of scores
    scale: tl.tensor,  # sm_scale * log2(e)
    NUM_SPLITS: tl.constexpr,
    min_tiles: tl.tensor,
    PAGE_HEADS: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,  # divides PAGE_TOKENS: a tile lies in one page, contiguous
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per split, head of the pages and row."""
    split, page_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    pages = page_table + row * max_pages
    await_inputs(EARLY)
    position = tl.load(positions + row)
    kv_head = page_head
    if heads is not None:
        kv_head = tl.load(heads + page_head)
    kv_len = (position + 1).to(tl.int32)
    length = split_length(kv_len, NUM_SPLITS, BLOCK_T, min_tiles)
    first = split * length
    last = tl.minimum(first + length, kv_len)
    if first >= last:
        return  # nor does the second kernel read it

    # Where a tile is gets loaded an iteration ahead, by hand: the compiler would give that most of
    # its pipeline's stages, and wait for the query before it looks for the first one.
    page = tl.load(pages + first // PAGE_TOKENS)
    first_head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE
    q = load_query(query, first_head, GROUP_SIZE, HEAD_DIM, BLOCK_G, BLOCK_D)
    g, t, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_T):
        keys = page.to(tl.pointer_type(query.dtype.element_ty))
        keys += (page_head * PAGE_TOKENS + start % PAGE_TOKENS).to(tl.int64) * HEAD_DIM
        following = start + BLOCK_T
        page = tl.load(pages + following // PAGE_TOKENS, mask=following < last, other=0)
        of_tile = score_tile(q, keys, last - start, scale, HEAD_DIM, BLOCK_T, BLOCK_D)
        if scores is not None:
            score_row = (row * PAGE_HEADS + page_head) * GROUP_SIZE + g
            target = scores + score_row[:, None] * max_tokens + (start + t)[None, :]
            kept = (g < GROUP_SIZE)[:, None] & (start + t < last)[None, :]
            tl.store(target, of_tile, mask=kept)
        row_max, row_sum, acc = weigh_tile(
            of_tile,
            keys + PAGE_HEADS * PAGE_TOKENS * HEAD_DIM,
            last - start,
            row_max,
            row_sum,
            acc,
            HEAD_DIM,
            BLOCK_T,
            BLOCK_D,
        )

    target = (first_head + g) * NUM_SPLITS + split
    inside = (g < GROUP_SIZE)[:, None] & (d < HEAD_DIM)[None, :]
    o = acc / row_sum[:, None]
    tl.store(partial_out + target[:, None] * HEAD_DIM + d[None, :], o, mask=inside)
    tl.store(partial_lse + target, row_max + tl.log2(row_sum), mask=g < GROUP_SIZE)


@jit_for_any("min_tiles")
def merge_splits_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,  # as above
    out: tl.tensor,
    lse: tl.tensor,  # natural log; None: nobody wants it
    NUM_SPLITS: tl.constexpr,
    min_tiles: tl.tensor,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of the kernel before
    TILE_S: tl.constexpr,  # of splits
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per row, query head of the pages' heads, and BLOCK_D elements of it."""
    row = tl.program_id(0).to(tl.int64)
    page_head, piece = tl.program_id(1) // GROUP_SIZE, tl.program_id(2)
    kv_head = page_head
    if heads is not None:
        kv_head = tl.load(heads + page_head)
    head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE + tl.program_id(1) % GROUP_SIZE
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    used = tl.cdiv(kv_len, split_length(kv_len, NUM_SPLITS, BLOCK_T, min_tiles))
    d = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    # Only here: the first kernel had waited for what is read above before this one could start.
    await_inputs(EARLY)
    largest, total, acc = merge_states(
        partial_out, partial_lse, head * NUM_SPLITS, 1, used, d, HEAD_DIM, TILE_S
    )
    attended = used > 0  # an inactive row has no splits: 0, and an lse of -inf
    total = tl.where(attended, total, 1.0)
    o = (acc / total).to(out.dtype.element_ty)
    tl.store(out + head * HEAD_DIM + d, o, mask=d < HEAD_DIM)
    if lse is not None:
        natural = tl.where(attended, (largest + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + head, natural, mask=piece == 0)


def attend_pages(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor | None,
    *,
    page_heads: int,
    group_size: int,
    page_tokens: int,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scores: Tensor | None,
    launch: SplitLaunch | None,
) -> None:
    """Launch both kernels; the wrappers have checked the operands."""
    n, num_qo_heads, num_splits, head_dim = partial_out.shape
    launch = launch or SplitLaunch.default(head_dim, query.element_size())
    block_t = min(page_tokens, launch.tile_tokens)
    block_d = next_power_of_2(head_dim)
    min_tiles = min(n, _MAX_TILES_PER_SPLIT)
    merges_early = launch.merges_early and can_launch_early(query)
    paged_attention_kernel[(num_splits, page_heads, n)](
        query,
        page_table,
        positions,
        heads,
        partial_out,
        partial_lse,
        scores,
        page_table.shape[1],
        0 if scores is None else scores.shape[-1],
        sm_scale * math.log2(math.e),
        num_splits,
        min_tiles,
        page_heads,
        num_qo_heads,
        group_size,
        head_dim,
        page_tokens,
        max(MIN_GROUP, next_power_of_2(group_size)),
        block_t,
        block_d,
        merges_early,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    parts = min(block_d // 16, max(1, _MERGE_PROGRAMS // (n * page_heads * group_size)))
    merged_d = block_d // next_power_of_2(parts)
    merge_splits_kernel[(n, page_heads * group_size, -(-head_dim // merged_d))](
        partial_out,
        partial_lse,
        positions,
        heads,
        out,
        lse,
        num_splits,
        min_tiles,
        num_qo_heads,
        group_size,
        head_dim,
        block_t,
        min(_MERGED_ELEMENTS // merged_d, next_power_of_2(num_splits)),
        merged_d,
        merges_early,
        num_warps=4,
        **early_option(merges_early),
    )
