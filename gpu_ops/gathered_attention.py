"""Attention to rows that `gather_rows` brought, and to the window beside them. Without a window it
is merged into what other tokens have given. Means of clusters may stand for the tokens that are in
neither (offload/selection/estimate.py).

Split over tokens as `paged_attention`: a grid that is fixed at capture, pieces whose length is
computed from the counts on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dims,
    check_dtype,
    check_head_dim,
    check_latent_dim,
    check_page_tokens,
    check_rows,
    check_sinks,
    check_tensor,
    num_parts,
)
from gpu_ops.choose_places import fresh
from gpu_ops.cpu_pages import page_at
from gpu_ops.early_launch import await_inputs, can_launch_early, early_option
from gpu_ops.gather_rows import check_fixed, check_gathered, check_units, gathered_tokens
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, runs_kernel, tl
from gpu_ops.load_rows import elements_of
from gpu_ops.merge_parts import merge_parts_reference
from gpu_ops.online_softmax import (
    NUM_STAGES,
    Tiles,
    attend_means,
    attend_rows,
    capped,
    load_query,
    merge_states,
    split_length,
    store_state,
    with_sink,
)
from gpu_ops.paged_attention import num_kv_splits
from gpu_ops.row_format import as_numbers
from gpu_ops.window_attention import attend_reference, window_attention_reference

_MIN_TOKENS_PER_SPLIT = 32
_COPIED_ITEMS = 8192  # of int8 rows that are under way together, which take a register each
_MAX_TILES_PER_SPLIT = 8  # at least, in a batch whose rows fill the GPU together


def num_gathered_splits(num_heads: int, capacity: int, num_multiprocessors: int) -> int:
    """Splits with which the heads of one row fill the GPU, as far as there are tokens for them."""
    by_tokens = -(-capacity // _MIN_TOKENS_PER_SPLIT)
    return max(1, min(by_tokens, num_kv_splits(num_heads, num_multiprocessors)))


@dataclass(frozen=True)
class MissingRows:
    """Where rows come from that `choose_places` has a place for and that are not there yet.

    Attributes:
        token_of: int32 [n, T, capacity], of a `HotMap`; afterwards all rows are there.
        first_head: of the map's T heads the first of these.
        page_table: int64 [n, max_pages] of host pages, as `gather_rows` takes it.
        page_tokens: a power of two.
    """

    token_of: Tensor
    first_head: int
    page_table: Tensor
    page_tokens: int


@jit
def bring_rows(
    keys: tl.tensor,  # pointers to the first place's row
    values: tl.tensor,
    token_of: tl.tensor,
    page_table: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PARTS: tl.constexpr,  # 1: keys alone
    BLOCK_R: tl.constexpr,  # rows that are under way together
    BLOCK_ROW: tl.constexpr,  # at least ROW_ITEMS
) -> None:
    """Copy what is missing of places [first, last) from host pages."""
    t, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_ROW)
    for start in range(first, last, BLOCK_R):
        place = start + t
        token = -2 - tl.load(token_of + place, mask=place < last, other=-1)
        is_missing = token >= 0
        if tl.max(token, 0) >= 0:
            page = tl.load(page_table + token // PAGE_TOKENS, mask=is_missing, other=0)
            source = page + (kv_head * PAGE_TOKENS + token % PAGE_TOKENS).to(tl.int64) * ROW_BYTES
            of_row = source.to(tl.pointer_type(keys.dtype.element_ty))[:, None]
            of_key = elements_of(of_row, d[None, :], ROW_ITEMS)
            inside = is_missing[:, None] & (d < ROW_ITEMS)[None, :]
            target = place[:, None] * ROW_ITEMS + d[None, :]
            # Past the L1, which has no use for rows that are read once.
            k = tl.load(of_key, mask=inside, cache_modifier=".cg")
            if PARTS > 1:
                of_row += NUM_KV_HEADS * PAGE_TOKENS * ROW_ITEMS
                of_value = elements_of(of_row, d[None, :], ROW_ITEMS)
                v = tl.load(of_value, mask=inside, cache_modifier=".cg")
                tl.store(values + target, v, mask=inside)
            tl.store(keys + target, k, mask=inside)
            tl.debug_barrier()  # all threads know which
            tl.store(token_of + place, token, mask=is_missing)
    tl.debug_barrier()  # all of the program's rows are there


@jit_for_any("min_tiles")
def gathered_attention_kernel(
    query: tl.tensor,
    gathered: tl.tensor,
    counts: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    window: tl.tensor,  # None: it is attended to elsewhere
    means: tl.tensor,  # None, as the next: nothing stands for other tokens
    log_counts: tl.tensor,
    token_of: tl.tensor,  # None, as the next: all rows are there
    page_table: tl.tensor,
    max_pages: tl.tensor,
    first_head: tl.tensor,
    num_mapped: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    capacity: tl.tensor,
    scale: tl.tensor,  # sm_scale * log2(e)
    cap: tl.tensor,  # as of `score_tile`
    NUM_SPLITS: tl.constexpr,
    min_tiles: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FIXED_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    NUM_CLUSTERS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of BLOCK_G query heads, of a KV head; 1 where rows are missing
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per split, BLOCK_G query heads of a gathered head, and row; the window is one
    more split, with what stands for other tokens."""
    await_inputs(EARLY)
    split, slot = tl.program_id(0), tl.program_id(1) // NUM_GROUPS
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.load(heads + slot)
    num_tokens = gathered_tokens(counts, positions, row, kv_head, capacity, FIXED_TOKENS, NUM_UNITS)
    length = split_length(num_tokens, NUM_SPLITS, BLOCK_T, min_tiles)
    first = split * length
    last = tl.minimum(first + length, num_tokens)
    PARTS: tl.constexpr = 1 if LATENT_DIM > 0 else 2  # of keys alone `values` are not read
    keys = gathered + (row * PARTS * NUM_HEADS + slot) * capacity * ROW_ITEMS
    values = keys + NUM_HEADS * capacity.to(tl.int64) * ROW_ITEMS
    num_slots = NUM_SPLITS
    if window is not None:
        num_slots += 1
        if split == NUM_SPLITS:
            first = first * 0
            # Its tokens are the first so many of its places (`window_attention`).
            last = tl.minimum(tl.load(positions + row) + 1, WINDOW_TOKENS).to(tl.int32)
            keys = window + (row * PARTS * NUM_KV_HEADS + kv_head) * (WINDOW_TOKENS * ROW_ITEMS)
            values = keys + NUM_KV_HEADS * WINDOW_TOKENS * ROW_ITEMS
    if first >= last:
        return  # nor does the second kernel read it

    of_query = (row * NUM_KV_HEADS + kv_head) * GROUP_SIZE
    g = tl.program_id(1) % NUM_GROUPS * BLOCK_G + tl.arange(0, BLOCK_G)
    q, q_rest = load_query(query, of_query, g, GROUP_SIZE, HEAD_DIM, BLOCK_D), None
    if BLOCK_R > 0:
        q_rest = load_query(query, of_query, g, GROUP_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D)
    if token_of is not None:  # noqa: SIM102 (known when it is compiled)
        if split < NUM_SPLITS:
            bring_rows(
                keys,
                values,
                token_of + (row * num_mapped + first_head + slot) * capacity,
                page_table + row * max_pages,
                first,
                last,
                kv_head,
                NUM_KV_HEADS,
                ROW_ITEMS,
                PAGE_TOKENS,
                ROW_BYTES,
                PARTS,
                BLOCK_ROWS,
                BLOCK_ROW,
            )
    row_max, row_sum, acc = attend_rows(
        q,
        q_rest,
        keys,
        values,
        first,
        last,
        scale,
        cap,
        HEAD_DIM,
        ROW_ITEMS,
        LATENT_DIM,
        BLOCK_T,
        BLOCK_V,
    )
    if means is not None:  # noqa: SIM102 (known when it is compiled)
        if split == NUM_SPLITS:
            mean_keys = means + (row * 2 * NUM_HEADS + slot) * (NUM_CLUSTERS * HEAD_DIM)
            mean_values = mean_keys + NUM_HEADS * NUM_CLUSTERS * HEAD_DIM
            logs = log_counts + (row * NUM_KV_HEADS + kv_head) * NUM_CLUSTERS
            state = (row_max, row_sum, acc)
            row_max, row_sum, acc = attend_means(
                q,
                q_rest,
                mean_keys,
                mean_values,
                logs,
                NUM_CLUSTERS,
                scale,
                cap,
                *state,
                HEAD_DIM,
                LATENT_DIM,
                BLOCK_T,
            )
    state = (row_max, row_sum, acc)
    slots = ((row * NUM_HEADS + slot) * GROUP_SIZE + g) * num_slots + split
    VALUE_DIM: tl.constexpr = LATENT_DIM if LATENT_DIM > 0 else HEAD_DIM
    store_state(partial_out, partial_lse, g, slots, *state, GROUP_SIZE, HEAD_DIM, VALUE_DIM)


@jit_for_any("min_tiles")
def merge_gathered_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    counts: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,  # None: the window is the last split, and this is all
    sinks: tl.tensor,  # None: heads have none, or there is an lse
    capacity: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    min_tiles: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FIXED_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of the kernel before
    TILE_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per query head of the gathered KV heads, and row."""
    await_inputs(EARLY)
    member, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_head = tl.load(heads + member // GROUP_SIZE)
    num_tokens = gathered_tokens(counts, positions, row, kv_head, capacity, FIXED_TOKENS, NUM_UNITS)
    num_slots = NUM_SPLITS
    if lse is None:
        num_slots += 1
    elif num_tokens == 0:
        return  # the window's part is the whole
    used = tl.cdiv(num_tokens, split_length(num_tokens, NUM_SPLITS, BLOCK_T, min_tiles))
    d = tl.arange(0, BLOCK_D)
    first_slot = (row * NUM_HEADS * GROUP_SIZE + member) * num_slots
    largest, total, acc = merge_states(
        partial_out, partial_lse, first_slot, 1, used, d, HEAD_DIM, VALUE_DIM, TILE_S
    )

    head = (row * NUM_KV_HEADS + kv_head) * GROUP_SIZE + member % GROUP_SIZE
    inside = d < VALUE_DIM
    if lse is None:
        is_active = tl.load(positions + row) >= 0
        slot = first_slot + NUM_SPLITS
        window = tl.load(partial_lse + slot, mask=is_active, other=float("-inf"))
        window_out = tl.load(partial_out + slot * HEAD_DIM + d, mask=inside, other=0.0)
    else:
        window = tl.load(lse + head) * 1.4426950408889634  # base 2
        window_out = tl.load(out + head * HEAD_DIM + d, mask=inside, other=0.0)
    # A part of no tokens may be anything; one whose lse is NaN has some.
    window_out = tl.where(window == float("-inf"), 0.0, window_out)
    new_largest = tl.maximum(largest, window)
    weight, window_weight = tl.exp2(largest - new_largest), tl.exp2(window - new_largest)
    new_total = total * weight + window_weight
    o = acc * weight + window_out * window_weight
    if lse is None:
        if sinks is not None:
            of_row = head - row * (NUM_KV_HEADS * GROUP_SIZE)
            new_total = with_sink(new_total, new_largest, sinks, of_row)
        o /= tl.where(new_total == 0, 1.0, new_total)  # an inactive row's is 0
    else:
        o /= new_total
        tl.store(lse + head, (new_largest + tl.log2(new_total)) * 0.6931471805599453)
    tl.store(out + head * HEAD_DIM + d, o.to(out.dtype.element_ty), mask=inside)


def gathered_attention(
    query: Tensor,
    gathered: Tensor,
    counts: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    group_size: int,
    sink_tokens: int,
    recent_tokens: int,
    sm_scale: float,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    window: Tensor | None = None,
    means: Tensor | None = None,
    log_counts: Tensor | None = None,
    missing: MissingRows | None = None,
    sinks: Tensor | None = None,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend the query heads of `heads` to their gathered tokens, and merge that into (out, lse);
    or attend to them and the window, which is all that there is.

    Other heads stay as they are; heads that gathered nothing, and inactive rows, where there is no
    window.

    Args:
        query: [n, num_qo_heads * head_dim].
        gathered: [n, 2, num_heads, capacity, row], as `gather_rows` fills it: rows of head_dim in
            query's dtype, or of int8 (`row_format`), and then those of the window, too. With a
            latent_dim keys alone, [n, 1, ..], and in the window.
        counts: int32 [n, num_units] of `gather_rows`: tokens of each selection, of which the sinks
            and the recent ones are not gathered. num_units is num_kv_heads, or 1.
        positions: int64 [n], -1 for an inactive row.
        heads: int32 [num_heads], distinct KV heads.
        partial_out, partial_lse: scratch, float32 [n, num_heads * group_size, num_splits, head_dim]
            and [n, num_heads * group_size, num_splits] with the num_splits of
            `num_gathered_splits`, and one more for the window.
        out: [n, num_qo_heads * head_dim]. Without a window float32: on entry attention to other
            tokens, normalised. With one in query's dtype, 0 for an inactive row.
        lse: float32 [n, num_qo_heads], natural log; -inf where there were no other tokens, and then
            `out` may be anything. None with a window.
        window: as of `window_attention`.
        means, log_counts: with a window, [n, 2, num_heads, clusters, head_dim] in query's dtype and
            float32 [n, num_kv_heads, clusters], as `fetch_rows` keeps them: mean keys and values of
            clusters of other tokens, and the base-2 logarithm of how many each stands for.
        missing: rows of `gathered` that have to be brought first, into it; None: all are there.
        sinks: with a window, float32 [num_qo_heads], logits that join each softmax and have no
            value; or None.
        latent_dim: as of `retrieval_attention`; then no rows may be missing where a program does
            not have all query heads of a group (more than 32 of wide heads).
        softcap: as of `retrieval_attention`; of means, too.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_dtype("query", query)
    device = query.device
    check_dims("partial_out", partial_out, "[n, num_heads * group_size, num_splits, head_dim]")
    head_dim = partial_out.shape[3]
    check_head_dim(head_dim)
    check_latent_dim(latent_dim, head_dim)
    n, num_heads, capacity, row_items = check_gathered("gathered", gathered, device)
    parts = num_parts(latent_dim)
    check_rows("gathered", gathered, (n, parts, num_heads, capacity), head_dim, query)
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    num_kv_heads, rest = divmod(query.shape[-1], group_size * head_dim)
    if rest or not num_kv_heads:
        raise ValueError(
            f"query must have groups of {group_size} heads of {head_dim},"
            f" got {query.shape[-1]} columns"
        )
    num_units = check_units(counts, num_kv_heads)
    fixed_tokens = check_fixed(sink_tokens, recent_tokens)
    check_dims("partial_lse", partial_lse, "[n, num_heads * group_size, num_splits]")
    num_splits = partial_lse.shape[2] - (window is not None)
    row_shape = (n, num_kv_heads * group_size * head_dim)
    partial = (n, num_heads * group_size, partial_lse.shape[2])
    if num_splits < 1 or (window is None) == (lse is None):
        raise ValueError(
            "there must be an lse, or a window and a split for it beside another, got "
            f"{partial_lse.shape[2]} splits"
        )
    check_tensor("query", query, row_shape, query.dtype, device)
    check_tensor("counts", counts, (n, num_units), torch.int32, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    check_tensor("partial_lse", partial_lse, partial, torch.float32, device)
    check_tensor("partial_out", partial_out, (*partial, head_dim), torch.float32, device)
    window_tokens = 0
    if window is not None:
        check_dims("window", window, "[n, 2, num_kv_heads, window_tokens, row]")
        window_tokens = window.shape[3]
        window_shape = (n, parts, num_kv_heads, window_tokens, row_items)
        check_tensor("window", window, window_shape, gathered.dtype, device)
    num_clusters = 0
    if means is not None:
        check_dims("means", means, "[n, 2, num_heads, clusters, head_dim]")
        num_clusters = means.shape[3]
        shape_of_means = (n, 2, num_heads, num_clusters, head_dim)
        check_tensor("means", means, shape_of_means, query.dtype, device)
        if log_counts is None or window is None:
            raise ValueError("means need log_counts and a window")
        shape_of_logs = (n, num_kv_heads, num_clusters)
        check_tensor("log_counts", log_counts, shape_of_logs, torch.float32, device)
    check_tensor("out", out, row_shape, torch.float32 if window is None else query.dtype, device)
    if lse is not None:
        check_tensor("lse", lse, (n, num_kv_heads * group_size), torch.float32, device)
    if sinks is not None and window is None:
        raise ValueError("sinks need a window: else they are of the last merge")
    check_sinks(sinks, num_kv_heads * group_size, device)
    if missing is not None:
        token_of, page_table = missing.token_of, missing.page_table
        check_dims("token_of", token_of, "[n, T, capacity]")
        num_mapped = token_of.shape[1]
        check_tensor("token_of", token_of, (n, num_mapped, capacity), torch.int32, device)
        check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
        check_page_tokens(missing.page_tokens)
        if not 0 <= missing.first_head <= num_mapped - num_heads:
            raise ValueError(
                f"first_head must be in [0, {num_mapped - num_heads}] for {num_heads} of "
                f"{num_mapped} heads, got {missing.first_head}"
            )
    tiles = Tiles.of(head_dim, group_size, query.element_size(), gathered.dtype, latent_dim)
    if missing is not None and tiles.num_groups > 1:
        raise ValueError(
            f"{group_size} query heads of head_dim={head_dim} share a KV head whose rows are "
            f"missing; at most {tiles.group} may"
        )
    selected = (counts, positions, heads)
    if not runs_kernel(query):
        if missing is not None:
            bring_rows_reference(gathered, *selected, missing, num_kv_heads, fixed_tokens)
        return gathered_attention_reference(
            query,
            gathered,
            *selected,
            group_size,
            head_dim,
            fixed_tokens,
            sm_scale,
            out,
            lse,
            window,
            means,
            log_counts,
            sinks,
            latent_dim,
            softcap,
        )
    block_t, block_row = tiles.tokens, next_power_of_2(row_items)
    is_int8, most_rows = row_items != head_dim, max(16, 2 * _COPIED_ITEMS // block_row)
    splits = (num_splits, min(n, _MAX_TILES_PER_SPLIT))
    shape = (num_heads, num_units, num_kv_heads, group_size, fixed_tokens, head_dim)
    early = can_launch_early(query)  # the merge, while the splits run
    gathered_attention_kernel[(partial_lse.shape[2], num_heads * tiles.num_groups, n)](
        query,
        gathered,
        *selected,
        window,
        means,
        log_counts if means is not None else None,
        *(
            (None, None, 0, 0, 0)
            if missing is None
            else (token_of, page_table, page_table.shape[1], missing.first_head, num_mapped)
        ),
        partial_out,
        partial_lse,
        capacity,
        sm_scale * math.log2(math.e),
        softcap * math.log2(math.e) or None,
        *splits,
        *shape,
        row_items,
        window_tokens,
        num_clusters,
        1 if missing is None else missing.page_tokens,
        row_items * gathered.element_size(),
        latent_dim,
        tiles.group,
        tiles.num_groups,
        max(16, _COPIED_ITEMS // block_row) if is_int8 else min(2 * block_t, most_rows),
        block_t,
        tiles.dims,
        tiles.rest_dims,
        tiles.value_dims,
        block_row,
        early,
        num_warps=tiles.num_warps if missing is None else 8,  # more rows are under way
        num_stages=NUM_STAGES,
        **early_option(early and missing is not None),  # after `choose_places`
    )
    merge_gathered_kernel[(num_heads * group_size, n)](
        partial_out,
        partial_lse,
        *selected,
        out,
        lse,
        sinks,
        capacity,
        *splits,
        *shape,
        latent_dim or head_dim,
        block_t,
        min(64, next_power_of_2(num_splits)),
        tiles.value_dims,
        early,
        num_warps=4,
        **early_option(early),
    )


def bring_rows_reference(
    gathered: Tensor,
    counts: Tensor,
    positions: Tensor,
    heads: Tensor,
    missing: MissingRows,
    num_kv_heads: int,
    fixed_tokens: int,
) -> None:
    """What `gathered_attention` brings, by torch; pages are CPU memory."""
    page_tokens = missing.page_tokens
    page_shape = (gathered.shape[1], num_kv_heads, page_tokens, gathered.shape[4])
    for row, position in enumerate(positions.tolist()):
        for slot, kv_head in enumerate(heads.tolist() if position >= 0 else ()):
            token_of = missing.token_of[row, missing.first_head + slot]
            num_hot = int(counts[row, kv_head if counts.shape[1] > 1 else 0]) - fixed_tokens
            for place in (token_of[: max(num_hot, 0)] < -1).nonzero()[:, 0].tolist():
                token = int(fresh(token_of[place]))
                address = int(missing.page_table[row, token // page_tokens])
                page = page_at(address, page_shape, gathered.dtype)
                gathered[row, :, slot, place] = page[:, kv_head, token % page_tokens]
                token_of[place] = token


def gathered_attention_reference(
    query: Tensor,
    gathered: Tensor,
    counts: Tensor,
    positions: Tensor,
    heads: Tensor,
    group_size: int,
    head_dim: int,
    fixed_tokens: int,
    sm_scale: float,
    out: Tensor,
    lse: Tensor | None,
    window: Tensor | None,
    means: Tensor | None = None,
    log_counts: Tensor | None = None,
    sinks: Tensor | None = None,
    latent_dim: int = 0,
    softcap: float = 0.0,
) -> None:
    """`gathered_attention` by torch, in float32."""
    result = out
    if window is not None:
        out = torch.empty_like(out, dtype=torch.float32)
        lse = torch.empty(len(out), out.shape[1] // head_dim, device=out.device)
        of_softmax: dict[str, Any] = {"sm_scale": sm_scale, "latent_dim": latent_dim}
        of_softmax["softcap"] = softcap
        window_attention_reference(query, window, positions, **of_softmax, out=out, lse=lse)
    value_dim = latent_dim or head_dim
    assert lse is not None
    for row, position in enumerate(positions.tolist()):
        for slot, kv_head in enumerate(heads.tolist() if position >= 0 else ()):
            count = int(counts[row, kv_head if counts.shape[1] > 1 else 0])
            num_tokens = min(max(count - fixed_tokens, 0), gathered.shape[3])
            group = slice(kv_head * group_size, (kv_head + 1) * group_size)
            q = query[row].view(-1, head_dim)[group]
            before, before_out = lse[row, group], out[row].view(-1, head_dim)[group, :value_dim]
            if num_tokens or means is not None:
                before_out.masked_fill_((before == float("-inf"))[:, None], 0.0)
            if num_tokens:
                kv = as_numbers(gathered[row, :, slot : slot + 1, :num_tokens], head_dim)
                values = kv[-1, ..., :value_dim]
                part = attend_reference(q, kv[0], values, sm_scale, softcap)
                merge_parts_reference(before_out, before, *part)
            if means is not None and log_counts is not None:
                key, value = means[row, :, slot].float()
                value = (key if latent_dim else value)[:, :value_dim]
                scores = capped(q.float() @ key.T * sm_scale, softcap)
                scores += log_counts[row, kv_head] * math.log(2.0)
                of_means = scores.logsumexp(dim=-1)
                weights = (scores - of_means.clamp_min(-1e30)[:, None]).exp()
                merge_parts_reference(before_out, before, weights @ value, of_means)
    if window is not None:
        if sinks is not None:
            out *= (lse - lse.logaddexp(sinks)).exp().repeat_interleave(head_dim, 1)
            out.masked_fill_((positions < 0)[:, None], 0.0)
        to, of = (x.view(len(out), -1, group_size, head_dim) for x in (result, out))
        to[:, heads.long(), :, :value_dim] = of[:, heads.long(), :, :value_dim].to(to.dtype)
