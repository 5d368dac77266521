"""Rows of host pages into places of a set that stays on the GPU: what is missing of it comes over
PCIe, the rest is there from earlier steps. `gathered_attention` attends to such a set, and to the
means of clusters of the other tokens, of which one changes in a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dims,
    check_dtype,
    check_page_tokens,
    check_reachable,
    check_row_dtype,
    check_rows,
    check_tensor,
)
from gpu_ops.cpu_pages import page_at
from gpu_ops.gather_rows import GatherLaunch, check_fixed, check_gathered
from gpu_ops.launch import jit, next_power_of_2, pointer, runs_kernel, tl
from gpu_ops.load_rows import elements_of

# Few multiprocessors, each to itself: see `GatherLaunch`.
_LAUNCH = GatherLaunch(programs=8)


@jit
def load_list(
    i: tl.tensor,
    num_lists: tl.tensor,
    hot_counts: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    fetch_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
) -> tl.tensor:
    """Where the counts of list i lie, how many rows the list has and how many will then be hot.
    Rows follow each other, with one list for each head; past the last list there is nothing."""
    there, row = i < num_lists, i // NUM_HEADS
    at = row * NUM_KV_HEADS + tl.load(heads + i % NUM_HEADS, mask=there, other=0)
    there &= tl.load(positions + row, mask=there, other=-1) >= 0
    num = tl.minimum(tl.load(hot_counts + 2 * at, mask=there, other=0), fetch_tokens)
    return at, num, tl.load(hot_counts + 2 * at + 1, mask=there, other=0)


@jit
def load_pairs(
    fetches: tl.tensor,
    at: tl.tensor,
    index: tl.tensor,
    num: tl.tensor,
    fetch_tokens: tl.tensor,
) -> tl.tensor:
    """(tokens, places), -1 past the end."""
    pair = fetches + (at.to(tl.int64) * fetch_tokens + index) * 2
    present = index < num
    return tl.load(pair, mask=present, other=-1), tl.load(pair + 1, mask=present, other=-1)


@jit
def update_means(
    at: tl.tensor,
    row: tl.tensor,
    slot: tl.tensor,
    is_active: tl.tensor,
    rest_counts: tl.tensor,
    rest_means: tl.tensor,
    means: tl.tensor,
    log_counts: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_CLUSTERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A head's counts, as base-2 logarithms, and the means of the cluster that has grown."""
    c, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    counts = rest_counts + at * (NUM_CLUSTERS + 1)
    count = tl.load(counts + c, mask=(c < NUM_CLUSTERS) & is_active, other=0)
    grown = tl.load(counts + NUM_CLUSTERS, mask=is_active, other=-1)
    key = tl.load(rest_means + at * 2 * HEAD_DIM + d, mask=inside & is_active, other=0.0)
    value = tl.load(rest_means + (at * 2 + 1) * HEAD_DIM + d, mask=inside & is_active, other=0.0)
    logs = tl.where(count > 0, tl.log2(tl.maximum(count, 1).to(tl.float32)), float("-inf"))
    tl.store(log_counts + at * NUM_CLUSTERS + c, logs, mask=c < NUM_CLUSTERS)
    inside &= (grown >= 0) & (grown < NUM_CLUSTERS)
    of_key = (row * 2 * NUM_HEADS + slot) * NUM_CLUSTERS + grown
    of_value = of_key + NUM_HEADS * NUM_CLUSTERS
    tl.store(means + of_key * HEAD_DIM + d, key.to(means.dtype.element_ty), mask=inside)
    tl.store(means + of_value * HEAD_DIM + d, value.to(means.dtype.element_ty), mask=inside)


@jit
def fetch_rows_kernel(
    fetches: tl.tensor,
    hot_counts: tl.tensor,
    rest_counts: tl.tensor,  # None, as the next three: nothing is estimated
    rest_means: tl.tensor,
    means: tl.tensor,
    log_counts: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    hot: tl.tensor,
    counts: tl.tensor,
    num_lists: tl.tensor,
    max_pages: tl.tensor,
    fetch_tokens: tl.tensor,
    capacity: tl.tensor,
    PARTS: tl.constexpr,  # of `hot`; 1: keys alone
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_CLUSTERS: tl.constexpr,
    FIXED_TOKENS: tl.constexpr,  # sinks and recent ones
    HEAD_DIM: tl.constexpr,  # of means
    ROW_ITEMS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
) -> None:
    """Programs, fixed at capture, that share the lists."""
    i, programs = tl.program_id(0), tl.num_programs(0)
    d, block = tl.arange(0, BLOCK_ROW), tl.arange(0, BLOCK_T)
    # Counts and pairs come over PCIe, too: they are asked for one and two lists ahead.
    at, num, num_hot = load_list(
        i, num_lists, hot_counts, positions, heads, fetch_tokens, NUM_HEADS, NUM_KV_HEADS
    )
    next_at, next_num, next_num_hot = load_list(
        i + programs, num_lists, hot_counts, positions, heads, fetch_tokens, NUM_HEADS, NUM_KV_HEADS
    )
    tokens, places = load_pairs(fetches, at, block, num, fetch_tokens)
    for _ in range(i, num_lists, programs):
        last_at, last_num, last_num_hot = load_list(
            i + 2 * programs,
            num_lists,
            hot_counts,
            positions,
            heads,
            fetch_tokens,
            NUM_HEADS,
            NUM_KV_HEADS,
        )
        ahead = load_pairs(fetches, next_at, block, next_num, fetch_tokens)
        row, slot = (i // NUM_HEADS).to(tl.int64), i % NUM_HEADS
        position = tl.load(positions + row)
        tl.store(counts + at, tl.where(position >= 0, num_hot + FIXED_TOKENS, 0))
        if means is not None:
            update_means(
                at,
                row,
                slot,
                position >= 0,
                rest_counts,
                rest_means,
                means,
                log_counts,
                NUM_HEADS,
                NUM_CLUSTERS,
                HEAD_DIM,
                BLOCK_C,
                BLOCK_D,
            )
        for start in range(0, num, BLOCK_T):
            if start > 0:
                tokens, places = load_pairs(fetches, at, start + block, num, fetch_tokens)
            # After an error there may be what an earlier sequence was to fetch, whose pages are
            # gone.
            present = (tokens >= 0) & (tokens < position) & (places >= 0) & (places < capacity)
            page_at = page_table + row * max_pages + tokens // PAGE_TOKENS
            page = tl.load(page_at, mask=present, other=0)
            key_rows = (at % NUM_KV_HEADS) * PAGE_TOKENS + tokens % PAGE_TOKENS
            source = page + key_rows.to(tl.int64) * ROW_BYTES
            of_row = source.to(tl.pointer_type(hot.dtype.element_ty))[:, None]
            keys = elements_of(of_row, d[None, :], ROW_ITEMS)
            inside = present[:, None] & (d < ROW_ITEMS)[None, :]
            # Past the L1, which has no use for rows that are read once.
            k = tl.load(keys, mask=inside, cache_modifier=".cg")
            v = k
            if PARTS > 1:
                of_row += NUM_KV_HEADS * PAGE_TOKENS * ROW_ITEMS
                values = elements_of(of_row, d[None, :], ROW_ITEMS)
                v = tl.load(values, mask=inside, cache_modifier=".cg")
            target = ((row * PARTS * NUM_HEADS + slot) * capacity + places) * ROW_ITEMS
            out = hot + target[:, None] + d[None, :]
            tl.store(out, k, mask=inside)
            if PARTS > 1:
                tl.store(out + NUM_HEADS * capacity.to(tl.int64) * ROW_ITEMS, v, mask=inside)
        tokens, places = ahead
        at, num, num_hot, i = next_at, next_num, next_num_hot, i + programs
        next_at, next_num, next_num_hot = last_at, last_num, last_num_hot


def fetch_rows(
    fetches: Tensor,
    hot_counts: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    page_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    hot: Tensor,
    counts: Tensor,
    rest_counts: Tensor | None = None,
    rest_means: Tensor | None = None,
    means: Tensor | None = None,
    log_counts: Tensor | None = None,
) -> None:
    """Copy keys and values of tokens out of host pages into their places among the hot rows.

    Args:
        fetches: int32 [n, num_kv_heads, fetch_tokens, 2], (token, place) with places in [0,
            capacity), distinct in each head; may be pinned host memory, as the next. Others, and
            tokens that are not before the row's last, are passed over.
        hot_counts: int32 [n, num_kv_heads, 2], how many of them count, and how many rows are hot
            afterwards: places [0, so many).
        page_table: int64 [n, max_pages], as `gather_rows` takes it.
        positions: int64 [n], each row's last token; -1 for an inactive row, which fetches nothing.
        heads: int32 [num_heads], KV heads that have hot rows.
        page_tokens: a power of two.
        sink_tokens, recent_tokens: added to `counts`, which `gathered_attention` subtracts.
        hot: out [n, 2, num_heads, capacity, row], keys and values of `heads` in their order; or
            [n, 1, ..], where pages have keys alone.
        counts: out int32 [n, num_kv_heads], hot rows and those of the window; 0 of inactive rows.
        rest_counts, rest_means: int32 [n, num_kv_heads, clusters + 1] and float32 [n, num_kv_heads,
            2, head_dim] of a mailbox: tokens that each cluster stands for, which cluster has new
            means, or -1, and these; may be pinned, too. None, as the next two: nothing stands for
            tokens that are not hot.
        means: out [n, 2, num_heads, clusters, head_dim], keys and values of `heads`; in the dtype
            of `hot`, if that is not int8.
        log_counts: out float32 [n, num_kv_heads, clusters], base 2; -inf: of no tokens.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_row_dtype("hot", hot)
    device = hot.device
    n, num_heads, capacity, row_items = check_gathered("hot", hot, device)
    check_page_tokens(page_tokens)
    check_dims("fetches", fetches, "[n, num_kv_heads, fetch_tokens, 2]")
    num_kv_heads, fetch_tokens = fetches.shape[1:3]
    fixed_tokens = check_fixed(sink_tokens, recent_tokens)
    pairs = (n, num_kv_heads, fetch_tokens, 2)
    check_reachable("fetches", fetches, pairs, torch.int32, device)
    check_reachable("hot_counts", hot_counts, (n, num_kv_heads, 2), torch.int32, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    check_tensor("counts", counts, (n, num_kv_heads), torch.int32, device)
    num_clusters, head_dim = 0, row_items
    if means is not None:
        check_dims("means", means, "[n, 2, num_heads, clusters, head_dim]")
        num_clusters, head_dim = means.shape[3:]
        check_rows("hot", hot, (n, hot.shape[1], num_heads, capacity), head_dim, means)
        check_dtype("means", means)
        check_tensor("means", means, (n, 2, num_heads, num_clusters, head_dim), means.dtype, device)
        if rest_counts is None or rest_means is None or log_counts is None:
            raise ValueError("means need rest_counts, rest_means and log_counts")
        rest = (n, num_kv_heads)
        shape = (*rest, num_clusters + 1)
        check_reachable("rest_counts", rest_counts, shape, torch.int32, device)
        check_reachable("rest_means", rest_means, (*rest, 2, head_dim), torch.float32, device)
        check_tensor("log_counts", log_counts, (*rest, num_clusters), torch.float32, device)
    if not runs_kernel(hot):
        if means is not None:
            assert rest_counts is not None
            assert rest_means is not None
            assert log_counts is not None
            update_means_reference(rest_counts, rest_means, positions, heads, means, log_counts)
        page_shape = (hot.shape[1], num_kv_heads, page_tokens, row_items)
        return fetch_rows_reference(
            fetches, hot_counts, page_table, positions, heads, page_shape, fixed_tokens, hot, counts
        )
    row_bytes = row_items * hot.element_size()
    fetch_rows_kernel[(_LAUNCH.programs,)](
        pointer(fetches),
        pointer(hot_counts),
        pointer(rest_counts) if means is not None else None,
        pointer(rest_means) if means is not None else None,
        means,
        log_counts if means is not None else None,
        page_table,
        positions,
        heads,
        hot,
        counts,
        n * num_heads,
        page_table.shape[1],
        fetch_tokens,
        capacity,
        hot.shape[1],
        num_heads,
        num_kv_heads,
        num_clusters,
        fixed_tokens,
        head_dim,
        row_items,
        row_bytes,
        page_tokens,
        _LAUNCH.tile_tokens(row_bytes),
        next_power_of_2(max(num_clusters, 1)),
        next_power_of_2(head_dim),
        next_power_of_2(row_items),
        num_warps=_LAUNCH.num_warps,
    )


def update_means_reference(
    rest_counts: Tensor,
    rest_means: Tensor,
    positions: Tensor,
    heads: Tensor,
    means: Tensor,
    log_counts: Tensor,
) -> None:
    """What `fetch_rows` does of clusters, by torch."""
    for row, position in enumerate(positions.tolist()):
        for slot, kv_head in enumerate(heads.tolist()):
            *counts, grown = rest_counts[row, kv_head].tolist() if position >= 0 else [0, -1]
            log_counts[row, kv_head] = torch.tensor(counts).clamp_min(0).log2()
            if 0 <= grown < means.shape[3]:
                means[row, :, slot, grown] = rest_means[row, kv_head].to(means.dtype)


def fetch_rows_reference(
    fetches: Tensor,
    hot_counts: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    page_shape: tuple[int, int, int, int],
    fixed_tokens: int,
    hot: Tensor,
    counts: Tensor,
) -> None:
    """`fetch_rows` by torch; pages [*page_shape] are CPU memory."""
    page_tokens = page_shape[2]
    for row, position in enumerate(positions.tolist()):
        for slot, kv_head in enumerate(heads.tolist()):
            num_fetches, num_hot = hot_counts[row, kv_head].tolist()
            counts[row, kv_head] = 0
            if position < 0:
                continue
            counts[row, kv_head] = num_hot + fixed_tokens
            for token, place in fetches[row, kv_head, : max(0, num_fetches)].tolist():
                if not (0 <= token < position and 0 <= place < hot.shape[3]):
                    continue
                page = page_at(int(page_table[row, token // page_tokens]), page_shape, hot.dtype)
                hot[row, :, slot, place] = page[:, kv_head, token % page_tokens]
