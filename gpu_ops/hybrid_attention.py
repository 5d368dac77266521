"""Decode attention over GPU pages of dense and block-sparse KV heads in one launch.

LycheeDecode's kernel: few heads attend to everything, the others to some blocks each, so that heads
differ in their work by a factor of thirty. The tiles of all (row, KV head) pairs are therefore one
sequence, of which every program takes an equal share (stream-K): it may attend for the end of one
pair and the beginning of the next, and leaves a partial state for each. A second kernel merges
them. Both compute the shares from the counts and positions on the device, so that one capture
serves all lengths and lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.checks import (
    MIN_PAGE_TOKENS,
    check_dims,
    check_dtype,
    check_group,
    check_head_dim,
    check_page_tokens,
    check_tensor,
)
from gpu_ops.cpu_pages import gather_pages
from gpu_ops.early_launch import await_inputs, can_launch_early, early_option, prefetch
from gpu_ops.launch import compiles, jit, next_power_of_2, runs_kernel, tl
from gpu_ops.online_softmax import (
    MIN_GROUP,
    attend_tile,
    load_query,
    merge_states,
    store_state,
    tile_tokens,
)
from gpu_ops.window_attention import attend_reference

DENSE = -1  # a block count: the head attends to all tokens

_MERGE_PROGRAMS = 256  # that the merge has at least, by parts of a head's output
_MERGED_ELEMENTS = 4096  # of the splits of a head, that a program of the merge loads at once
_PREFETCHED_LINES = 128  # per program, of each operand


@dataclass(frozen=True)
class HybridLaunch:
    """How the kernels are launched.

    Attributes:
        tile_tokens: keys that a program attends to at a time, a power of two; None: 8 KiB of them.
            Never more than a page or a block.
        num_warps, num_stages: of a program of the first kernel.
        segment_tiles: what each pair counts for beyond its tiles, as a program that changes over to
            another pair has nothing in flight for a while.
        merges_early: the merge is launched while the first kernel runs (`early_launch`), where the
            GPU can.
        starts_early: so is the first kernel, while the one before it in the stream runs.
        prefetches: programs bring page table, lists and query into the L2 before they need them.
    """

    tile_tokens: int | None = None
    num_warps: int = 4
    num_stages: int = 3
    segment_tiles: int = 1
    merges_early: bool = True
    starts_early: bool = True
    prefetches: bool = True


_LAUNCH = HybridLaunch()


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


def hybrid_programs(num_multiprocessors: int) -> int:
    """Programs that fill the GPU at once: two on each multiprocessor."""
    return 2 * num_multiprocessors


def hybrid_attention(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_indices: Tensor,
    block_counts: Tensor,
    *,
    num_kv_heads: int,
    page_tokens: int,
    block_tokens: int,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    launch: HybridLaunch = _LAUNCH,
) -> None:
    """Attend each KV head of each row to all tokens [0, position], or to some blocks of them.

    Args:
        query, page_table, positions: as `retrieval_attention` of all KV heads takes them.
        block_indices: int32 [n, num_kv_heads, max_blocks], distinct blocks in any order. Block b is
            the tokens [b * block_tokens, (b + 1) * block_tokens) that the row has.
        block_counts: int32 [n, num_kv_heads], blocks of each list, or `DENSE`. 0 is as inactive.
        page_tokens, block_tokens: powers of two; of at least 64 for full speed.
        partial_out, partial_lse: scratch, float32 [slots, group_size, head_dim] and
            [slots, group_size] with slots = num_programs + n * num_kv_heads: the programs of the
            launch, as many as `hybrid_programs` says.
        out: [n, num_qo_heads * head_dim], query's dtype.
        lse: optional float32 [n, num_qo_heads], natural log.
        launch: how the kernels are launched.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_dtype("query", query)
    check_dims("partial_out", partial_out, "[slots, group_size, head_dim]")
    slots, group_size, head_dim = partial_out.shape
    n, device = query.shape[0], query.device
    num_qo_heads = num_kv_heads * group_size
    num_pairs = n * num_kv_heads
    check_head_dim(head_dim)
    check_group(num_qo_heads, num_kv_heads)
    check_page_tokens(page_tokens)
    check_page_tokens(block_tokens, "block_tokens")
    if slots <= num_pairs:
        raise ValueError(
            f"partial_out must have more slots than the {num_pairs} pairs of rows and KV heads,"
            f" got {slots}"
        )
    shape, pairs = (n, num_qo_heads * head_dim), (n, num_kv_heads)
    check_tensor("query", query, shape, query.dtype, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    listed = (*pairs, block_indices.shape[-1])
    check_tensor("block_indices", block_indices, listed, torch.int32, device)
    check_tensor("block_counts", block_counts, pairs, torch.int32, device)
    check_tensor("partial_out", partial_out, partial_out.shape, torch.float32, device)
    check_tensor("partial_lse", partial_lse, (slots, group_size), torch.float32, device)
    check_tensor("out", out, shape, query.dtype, device)
    if lse is not None:
        check_tensor("lse", lse, (n, num_qo_heads), torch.float32, device)
    half_tile = tile_tokens(head_dim, query.element_size()) // 2
    tile = launch.tile_tokens or max(MIN_PAGE_TOKENS, half_tile)
    check_page_tokens(tile, "tile_tokens")
    operands = (query, page_table, positions, block_indices, block_counts)
    if not runs_kernel(query):
        page_shape = (2, num_kv_heads, page_tokens, head_dim)
        return hybrid_attention_reference(*operands, page_shape, block_tokens, sm_scale, out, lse)
    block_t = min(tile, page_tokens, block_tokens)
    block_d, block_p = next_power_of_2(head_dim), next_power_of_2(num_pairs)
    num_programs = slots - num_pairs
    shares = (launch.segment_tiles, num_kv_heads, group_size, head_dim)
    can = can_launch_early(query)
    merges_early, starts_early = launch.merges_early and can, launch.starts_early and can
    hybrid_attention_kernel[(num_programs,)](
        *operands,
        partial_out,
        partial_lse,
        num_pairs,
        page_table.shape[1],
        block_indices.shape[2],
        sm_scale * math.log2(math.e),
        *shares,
        page_tokens,
        block_tokens,
        block_p,
        max(MIN_GROUP, next_power_of_2(group_size)),
        block_t,
        block_d,
        _PREFETCHED_LINES,
        launch.prefetches and (query.is_cuda or compiles()),
        merges_early or starts_early,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **early_option(starts_early),
    )
    parts = min(block_d // 16, max(1, _MERGE_PROGRAMS // (num_pairs * group_size)))
    part_d = block_d // next_power_of_2(parts)
    merge_hybrid_kernel[(num_pairs * group_size, -(-head_dim // part_d))](
        partial_out,
        partial_lse,
        positions,
        block_counts,
        out,
        partial_lse if lse is None else lse,
        num_pairs,
        num_programs,
        *shares,
        block_tokens,
        block_p,
        block_t,
        min(_MERGED_ELEMENTS // part_d, next_power_of_2(num_programs)),
        part_d,
        lse is not None,
        merges_early or starts_early,
        num_warps=4,
        **early_option(merges_early),
    )


def hybrid_attention_reference(
    query: Tensor,
    page_table: Tensor,
    positions: Tensor,
    block_indices: Tensor,
    block_counts: Tensor,
    page_shape: tuple[int, int, int, int],
    block_tokens: int,
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`hybrid_attention` by torch, in float32; pages [*page_shape] are CPU memory."""
    _, num_kv_heads, _, head_dim = page_shape
    heads = out.view(len(out), num_kv_heads, -1, head_dim).zero_()
    queries = query.view(heads.shape)
    if lse is not None:
        lse.fill_(float("-inf"))
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        kv_len = position + 1
        kv = gather_pages(page_table[row], kv_len, page_shape, query.dtype)
        for kv_head, count in enumerate(block_counts[row].tolist()):
            chosen = torch.ones(kv_len, dtype=torch.bool)
            if count >= 0:
                blocks = block_indices[row, kv_head, :count]
                chosen = torch.isin(torch.arange(kv_len) // block_tokens, blocks)
            if not bool(chosen.any()):
                continue
            kept = kv[:, kv_head : kv_head + 1, chosen]
            o, row_lse = attend_reference(queries[row, kv_head], kept[0], kept[1], sm_scale)
            heads[row, kv_head] = o.to(out.dtype)
            if lse is not None:
                lse[row].view(num_kv_heads, -1)[kv_head] = row_lse
