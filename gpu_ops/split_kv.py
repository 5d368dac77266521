"""The kernels of `retrieval_attention`: flash decoding over pages of KV on the GPU.

Every row's tokens are split into equal pieces, each attended to by one program per KV head, and a
second kernel merges the pieces. The grid is fixed when a CUDA graph is captured, so the number of
splits is too; how long they are is computed on the device from the row's position. All splits of
the longest row run at once on the whole GPU, whatever the lengths of the others.

Why a second launch and not the last program to arrive: with one KV head there are 264 pieces of
each of its query heads, half a megabyte that a single multiprocessor would read one after the other
(5 us and more), and that a launch reads on many.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_ops.early_launch import await_inputs
from gpu_ops.launch import jit_for_any, tl
from gpu_ops.online_softmax import load_query, score_tile, tile_tokens, weigh_tile
from gpu_ops.split_state import merge_states, split_length

PROGRAMS_PER_MULTIPROCESSOR = 2
# Rows of a batch fill the GPU together, so that their pieces need not be as small.
MAX_TILES_PER_SPLIT = 8


@dataclass(frozen=True)
class SplitLaunch:
    """How a split is computed.

    Args:
        tile_tokens: keys that are loaded together, a power of two of at least 16; a page may be
            smaller.
        num_warps: of a program.
        num_stages: of the loop over tiles; one tile less is in flight.
    """

    tile_tokens: int
    num_warps: int = 4
    num_stages: int = 3

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
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
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
        of_tile = score_tile(q, keys, last - start, scale, HEAD_DIM, BLOCK_T)
        if scores is not None:
            score_row = (row * PAGE_HEADS + page_head) * GROUP_SIZE + g
            target = scores + score_row[:, None] * max_tokens + (start + t)[None, :]
            kept = (g < GROUP_SIZE)[:, None] & (start + t < last)[None, :]
            tl.store(target, of_tile, mask=kept)
        values = keys + PAGE_HEADS * PAGE_TOKENS * HEAD_DIM
        state = (row_max, row_sum, acc)
        row_max, row_sum, acc = weigh_tile(of_tile, values, last - start, *state, HEAD_DIM)

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
