"""The two kernels of `hybrid_attention`: shares of the sequence of all tiles, and their merge."""

from __future__ import annotations

from gpu_ops.early_launch import await_inputs, prefetch
from gpu_ops.launch import jit, tl
from gpu_ops.online_softmax import attend_tile, load_query
from gpu_ops.split_state import merge_states, store_state


@jit
def count_tiles(
    block_counts: tl.tensor,
    positions: tl.tensor,
    pair: tl.tensor,
    num_pairs: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """Tiles that each pair attends to."""
    exists = pair < num_pairs
    count = tl.load(block_counts + pair, mask=exists, other=0)
    position = tl.load(positions + pair // NUM_KV_HEADS, mask=exists, other=-1)
    kv_len = (position + 1).to(tl.int32)
    tiles = tl.where(count < 0, tl.cdiv(kv_len, BLOCK_T), count * (BLOCK_TOKENS // BLOCK_T))
    return tl.where(kv_len > 0, tiles, 0)


@jit
def share_begin(program: tl.tensor, total: tl.tensor, num_programs: tl.tensor) -> tl.tensor:
    """Where a program's share of the sequence begins; the first ones have one element more."""
    each = total // num_programs
    return program * each + tl.minimum(program, total - each * num_programs)


@jit
def share_owner(place: tl.tensor, total: tl.tensor, num_programs: tl.tensor) -> tl.tensor:
    """The program whose share has this place; there are no more programs than places."""
    each = total // num_programs
    longer = total - each * num_programs
    of_longer = longer * (each + 1)
    return tl.where(
        place < of_longer, place // (each + 1), longer + (place - of_longer) // tl.maximum(each, 1)
    )


@jit
def tile_start(
    blocks: tl.tensor,
    tile: tl.tensor,
    last: tl.tensor,
    is_dense: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """The first token of a pair's tile; of one from `last` on, something that is not used."""
    nth = tile // (BLOCK_TOKENS // BLOCK_T)
    # Dense is the list of all blocks.
    block = tl.load(blocks + nth, mask=(is_dense == 0) & (tile < last), other=nth)
    return block * BLOCK_TOKENS + tile % (BLOCK_TOKENS // BLOCK_T) * BLOCK_T


@jit
def hybrid_attention_kernel(
    query: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    block_indices: tl.tensor,
    block_counts: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    num_pairs: tl.tensor,
    max_pages: tl.tensor,
    max_blocks: tl.tensor,
    scale: tl.tensor,  # sm_scale * log2(e)
    SEGMENT_TILES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least num_pairs
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,  # divides PAGE_TOKENS and BLOCK_TOKENS
    BLOCK_D: tl.constexpr,
    LINES: tl.constexpr,
    PREFETCHES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Each program takes a share of the tiles of all pairs, one pair after the other."""
    program = tl.program_id(0)
    # Where the first key is takes four loads, one after the other; together the programs have
    # fetched what they read by the time that the first of them is back.
    rows = num_pairs // NUM_KV_HEADS
    launched = tl.num_programs(0)
    prefetch(positions, rows * 8, program, launched, LINES, PREFETCHES)
    prefetch(block_counts, num_pairs * 4, program, launched, LINES, PREFETCHES)
    prefetch(page_table, rows * max_pages * 8, program, launched, LINES, PREFETCHES)
    prefetch(block_indices, num_pairs * max_blocks * 4, program, launched, LINES, PREFETCHES)
    query_bytes = num_pairs * (
        GROUP_SIZE * HEAD_DIM * query.dtype.element_ty.primitive_bitwidth // 8
    )
    prefetch(query, query_bytes, program, launched, LINES, PREFETCHES)
    await_inputs(EARLY)
    pair = tl.arange(0, BLOCK_P)
    tiles = count_tiles(
        block_counts, positions, pair, num_pairs, NUM_KV_HEADS, BLOCK_TOKENS, BLOCK_T
    )
    lengths = tl.where(tiles > 0, tiles + SEGMENT_TILES, 0)
    ends = tl.cumsum(lengths, 0)
    total = tl.sum(lengths, 0)
    num_programs = tl.minimum(launched, total)
    if program >= num_programs:
        return
    begin = share_begin(program, total, num_programs)
    end = share_begin(program + 1, total, num_programs)
    first_pair = tl.sum((ends <= begin).to(tl.int32), 0)
    last_pair = tl.sum((ends < end).to(tl.int32), 0)

    for current in range(first_pair, last_pair + 1):
        num_tiles = tl.sum(tl.where(pair == current, tiles, 0), 0)
        pair_begin = tl.sum(tl.where(pair < current, lengths, 0), 0) + SEGMENT_TILES
        first = tl.maximum(begin - pair_begin, 0)
        last = tl.minimum(end - pair_begin, num_tiles)
        if first < last:
            row = tl.cast(current // NUM_KV_HEADS, tl.int64)
            kv_head = current % NUM_KV_HEADS
            kv_len = (tl.load(positions + row) + 1).to(tl.int32)
            is_dense = tl.load(block_counts + current) < 0
            blocks = block_indices + tl.cast(current, tl.int64) * max_blocks
            pages = page_table + row * max_pages
            first_head = tl.cast(current, tl.int64) * GROUP_SIZE
            q = load_query(query, first_head, GROUP_SIZE, HEAD_DIM, BLOCK_G, BLOCK_D)
            # Not from -inf: the tiles of a block that ends the row may have no token at all.
            row_max = tl.full([BLOCK_G], -1e30, tl.float32)
            row_sum = tl.zeros([BLOCK_G], tl.float32)
            most_tokens = tl.zeros([], tl.int32)
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            # Where a tile is takes two loads, one after the other. They are made an iteration
            # ahead, by hand: the compiler would give them most of its pipeline's stages.
            start = tile_start(blocks, first, last, is_dense, BLOCK_TOKENS, BLOCK_T)
            page = tl.load(pages + start // PAGE_TOKENS, mask=start < kv_len, other=0)
            for tile in range(first, last):
                keys = page.to(tl.pointer_type(query.dtype.element_ty))
                keys += (kv_head * PAGE_TOKENS + start % PAGE_TOKENS).to(tl.int64) * HEAD_DIM
                num_tokens = kv_len - start
                most_tokens = tl.maximum(most_tokens, num_tokens)
                start = tile_start(blocks, tile + 1, last, is_dense, BLOCK_TOKENS, BLOCK_T)
                page = tl.load(pages + start // PAGE_TOKENS, mask=start < kv_len, other=0)
                values = keys + NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM
                state = (row_max, row_sum, acc)
                row_max, row_sum, acc = attend_tile(
                    q, keys, values, num_tokens, scale, *state, HEAD_DIM, BLOCK_T
                )
            # Tokens of which none counts are not no tokens: a score of -inf is of wrong numbers.
            row_sum = tl.where((row_sum == 0) & (most_tokens > 0), float("nan"), row_sum)
            # Programs and pairs both only grow along the sequence, so that their sum is unique.
            slots = (program + current).to(tl.int64) * GROUP_SIZE + tl.arange(0, BLOCK_G)
            state = (row_max, row_sum, acc)
            store_state(partial_out, partial_lse, slots, *state, GROUP_SIZE, HEAD_DIM)


@jit
def merge_hybrid_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    positions: tl.tensor,
    block_counts: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_pairs: tl.tensor,
    NUM_PROGRAMS: tl.constexpr,  # of the kernel before
    SEGMENT_TILES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_S: tl.constexpr,
    PART_D: tl.constexpr,  # elements of a head that a program merges
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per query head of a pair, and part of its output."""
    head = tl.program_id(0)
    current = head // GROUP_SIZE
    pair = tl.arange(0, BLOCK_P)
    tiles = count_tiles(
        block_counts, positions, pair, num_pairs, NUM_KV_HEADS, BLOCK_TOKENS, BLOCK_T
    )
    lengths = tl.where(tiles > 0, tiles + SEGMENT_TILES, 0)
    total = tl.sum(lengths, 0)
    num_programs = tl.maximum(tl.minimum(NUM_PROGRAMS, total), 1)
    num_tiles = tl.sum(tl.where(pair == current, tiles, 0), 0)
    begin = tl.sum(tl.where(pair < current, lengths, 0), 0) + SEGMENT_TILES
    first = share_owner(begin, total, num_programs)
    last = share_owner(begin + num_tiles - 1, total, num_programs)
    used = tl.where(num_tiles > 0, last - first + 1, 0)
    d = tl.program_id(1) * PART_D + tl.arange(0, PART_D)
    # Only here: the first kernel had waited for what is read above before this one could start.
    await_inputs(EARLY)
    first_slot = (first + current).to(tl.int64) * GROUP_SIZE + head % GROUP_SIZE
    largest, sum_of_weights, acc = merge_states(
        partial_out, partial_lse, first_slot, GROUP_SIZE, used, d, HEAD_DIM, TILE_S
    )
    # A pair without tokens: 0, and an lse of -inf.
    attended = sum_of_weights != 0
    sum_of_weights = tl.where(attended, sum_of_weights, 1.0)
    o = acc / sum_of_weights
    target = out + head.to(tl.int64) * HEAD_DIM + d
    tl.store(target, o.to(out.dtype.element_ty), mask=d < HEAD_DIM)
    if HAS_LSE:
        natural = (largest + tl.log2(sum_of_weights)) * 0.6931471805599453
        natural = tl.where(attended, natural, float("-inf"))
        tl.store(lse + head, natural, mask=tl.program_id(1) == 0)
