"""Rotary embedding of a decode step, and everything that its results are written to at once.

The query goes to the GPU's attention and to the CPU's mailbox, keys and values to the mailbox (the
CPU moves them into the host store), or into the host store's pages themselves, and to what stays on
the GPU: the window of sink and recent tokens, or the pages of a resident layer. The mailbox and the
host store are mapped host memory; the kernel writes them directly, as a copy node of a few KB costs
more than all of this kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dtype,
    check_group,
    check_head_dim,
    check_page_tokens,
    check_reachable,
    check_rotary_dim,
    check_tensor,
)
from gpu_ops.cpu_pages import page_at
from gpu_ops.launch import jit, next_power_of_2, pointer, runs_kernel, tl
from gpu_ops.load_rows import store_row
from gpu_ops.rms_norm import rms_norm_reference
from gpu_ops.rotate import rotate_reference
from gpu_ops.row_format import as_rows, row_items


@jit
def write_to_page(
    pages: tl.tensor,
    page_head: tl.tensor,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Writes a head's two halves into the page of `position` among a row's `pages`."""
    page = tl.load(pages + position // PAGE_TOKENS)
    if ROW_ITEMS == HEAD_DIM:
        row = page.to(tl.pointer_type(low.dtype))
    else:
        row = page.to(tl.pointer_type(tl.int8))
    row += (page_head * PAGE_TOKENS + position % PAGE_TOKENS) * ROW_ITEMS
    store_row(row, low, high, HEAD_DIM, ROW_ITEMS, BLOCK)


@jit
def rotate_some(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    e: tl.tensor,
    own: tl.tensor,
    norm: tl.tensor,  # None: no norm
    inverse: tl.tensor,
    ROTARY_DIM: tl.constexpr,
) -> tl.tensor:
    """Elements e of a head, `own` behind its norm, of which the first ROTARY_DIM are rotated."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    dtype = own.dtype
    inside, is_low = e < ROTARY_DIM, e < HALF
    at = tl.where(is_low, e + HALF, e - HALF)
    other = tl.load(x + at, mask=inside, other=0.0)
    if norm is not None:
        weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        other = (weight * (other.to(tl.float32) * inverse).to(dtype).to(tl.float32)).to(dtype)
    by_cos = own.to(tl.float32) * tl.load(cos + e, mask=inside, other=0.0).to(tl.float32)
    by_sin = other.to(tl.float32) * tl.load(sin + e, mask=inside, other=0.0).to(tl.float32)
    by_cos, by_sin = by_cos.to(dtype).to(tl.float32), by_sin.to(dtype).to(tl.float32)
    rotated = tl.where(is_low, by_cos - by_sin, by_cos + by_sin).to(dtype)
    return tl.where(inside, rotated, own)


@jit
def rope_publish_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    q_norm: tl.tensor,  # None, as k_norm: no norm per head
    k_norm: tl.tensor,
    norm_eps: tl.tensor,
    query_scale: tl.tensor,  # None: queries are as they were rotated
    query: tl.tensor,
    host_query: tl.tensor,  # None, as the others below: not written
    host_kv: tl.tensor,
    window: tl.tensor,
    page_table: tl.tensor,
    max_pages: tl.tensor,
    page_slots: tl.tensor,  # None: pages hold all KV heads
    host_pages: tl.tensor,
    max_host_pages: tl.tensor,
    NUM_QO_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,  # of the window; 1: keys alone, and values have no program
    NUM_PAGE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    RECENT_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    RING_TOKENS: tl.constexpr,  # 0: `page_table` has all tokens
    BLOCK: tl.constexpr,  # at least HEAD_DIM // 2
) -> None:
    """One program per row and head of qkv; it holds the head as its two halves."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return

    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = qkv.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    x = qkv + (row * (NUM_QO_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM + d
    low = tl.load(x, mask=inside, other=0.0)
    high = tl.load(x + HALF, mask=inside, other=0.0)

    if head < NUM_QO_HEADS + NUM_KV_HEADS:  # a value is neither normalised nor rotated
        low32, high32 = low.to(tl.float32), high.to(tl.float32)
        norm, inverse = q_norm, norm_eps
        if q_norm is not None:
            if head >= NUM_QO_HEADS:
                norm = k_norm
            squares = tl.sum(low32 * low32, 0) + tl.sum(high32 * high32, 0)
            inverse = tl.rsqrt(squares / HEAD_DIM + norm_eps)
            low_weight = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(norm + HALF + d, mask=inside, other=0.0).to(tl.float32)
            low32 = (low_weight * (low32 * inverse).to(dtype).to(tl.float32)).to(dtype)
            high32 = (high_weight * (high32 * inverse).to(dtype).to(tl.float32)).to(dtype)
            low, high = low32, high32
            low32, high32 = low32.to(tl.float32), high32.to(tl.float32)
        if ROTARY_DIM < HEAD_DIM:
            tables = (cos + row * ROTARY_DIM, sin + row * ROTARY_DIM)
            low = rotate_some(x - d, *tables, d, low, norm, inverse, ROTARY_DIM)
            high = rotate_some(x - d, *tables, d + HALF, high, norm, inverse, ROTARY_DIM)
        else:
            angle = row * HEAD_DIM + d
            low_cos = low32 * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
            low_sin = high32 * tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            high_cos = high32 * tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
            high_sin = low32 * tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
            low = (low_cos.to(dtype).to(tl.float32) - low_sin.to(dtype).to(tl.float32)).to(dtype)
            high = (high_cos.to(dtype).to(tl.float32) + high_sin.to(dtype).to(tl.float32)).to(dtype)

    if head < NUM_QO_HEADS:
        if query_scale is not None:
            scale = tl.load(query_scale + row).to(tl.float32)
            low = (low.to(tl.float32) * scale).to(dtype)
            high = (high.to(tl.float32) * scale).to(dtype)
        target = (row * NUM_QO_HEADS + head) * HEAD_DIM + d
        tl.store(query + target, low, mask=inside)
        tl.store(query + target + HALF, high, mask=inside)
        if host_query is not None:
            tl.store(host_query + target, low, mask=inside)
            tl.store(host_query + target + HALF, high, mask=inside)
    else:
        kv_head = (head - NUM_QO_HEADS).to(tl.int64)  # the value heads follow the key heads
        target = (row * 2 * NUM_KV_HEADS + kv_head) * HEAD_DIM + d
        if host_kv is not None:
            tl.store(host_kv + target, low, mask=inside)
            tl.store(host_kv + target + HALF, high, mask=inside)
        if window is not None:
            TOKENS: tl.constexpr = SINK_TOKENS + RECENT_TOKENS
            index = position
            if RECENT_TOKENS > 0 and position >= SINK_TOKENS:
                index = SINK_TOKENS + (position - SINK_TOKENS) % RECENT_TOKENS
            if index < TOKENS:
                of_window = (
                    window + ((row * PARTS * NUM_KV_HEADS + kv_head) * TOKENS + index) * ROW_ITEMS
                )
                store_row(of_window, low, high, HEAD_DIM, ROW_ITEMS, BLOCK)
        if page_table is not None:
            page_head = kv_head
            if page_slots is not None:
                page_head = tl.load(page_slots + kv_head % NUM_KV_HEADS).to(tl.int64)
                if page_head >= 0 and kv_head >= NUM_KV_HEADS:
                    page_head += NUM_PAGE_HEADS
            if page_head >= 0:
                pages = page_table + row * max_pages
                place = position
                if RING_TOKENS > 0:
                    place = position % RING_TOKENS
                to = (pages, page_head, place)
                write_to_page(*to, low, high, HEAD_DIM, ROW_ITEMS, PAGE_TOKENS, BLOCK)
        if host_pages is not None:
            pages = host_pages + row * max_host_pages
            to = (pages, kv_head, position)
            write_to_page(*to, low, high, HEAD_DIM, ROW_ITEMS, PAGE_TOKENS, BLOCK)


def rope_publish(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    num_kv_heads: int,
    head_dim: int | None = None,
    query: Tensor,
    host_query: Tensor | None = None,
    host_kv: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    query_scale: Tensor | None = None,
    window: Tensor | None = None,
    sink_tokens: int = 0,
    page_table: Tensor | None = None,
    page_tokens: int = 0,
    page_slots: Tensor | None = None,
    num_page_heads: int = 0,
    ring_tokens: int = 0,
    host_pages: Tensor | None = None,
    row_dtype: torch.dtype | None = None,
    keys_only: bool = False,
) -> None:
    """Rotate q and k (x * cos + rotate_half(x) * sin) and write q, k and v where they are needed.

    Values are rounded to the dtype where transformers rounds: after the norm, the product with its
    weight, each product and the sum. Rows with position -1 are inactive and write nothing.

    Args:
        qkv: [n, (num_qo_heads + 2 * num_kv_heads) * head_dim]; with num_kv_heads = 0 queries only.
        cos, sin: [n, rotary_dim], in qkv's dtype, of the first elements of each head; the others
            stay as they are.
        positions: int64 [n], of each row's token, or -1.
        head_dim: rotary_dim if None.
        query: out [n, num_qo_heads * head_dim].
        host_query: out, as `query`; pinned host memory (also on the GPU, as the next).
        host_kv: out [n, 2, num_kv_heads, head_dim], k then v.
        q_norm, k_norm: RMSNorm weights [head_dim] applied per head before the rotation (Qwen3).
        query_scale: [n], in qkv's dtype, multiplies rotated queries, which are rounded again.
        window: [n, 2, num_kv_heads, sink_tokens + recent_tokens, row]. Token p is at index p
            if p < sink_tokens, else at sink_tokens + (p - sink_tokens) % recent_tokens.
        page_table: int64 [n, max_pages], the addresses of each row's GPU pages of this layer,
            laid out as the host store's: [K|V][num_kv_heads][page_tokens][row].
        page_tokens: of `page_table` and `host_pages`.
        page_slots: int32 [num_kv_heads], where pages hold only `num_page_heads` of the KV heads:
            each head's place in a page, or -1.
        ring_tokens: that `page_table` has, the last ones, token p as if it were p % ring_tokens; 0:
            all of them.
        host_pages: int64 [n, max_host_pages], the addresses of each row's pages of this layer in
            host memory that the GPU reaches (pinned or registered), laid out as `page_table`'s are
            without `page_slots` and aligned to 16 bytes.
        row_dtype: of the rows in the window and in pages: qkv's, also where None is given, or int8
            (`row_format`).
        keys_only: v is written nowhere: the window is [n, 1, ..], pages have keys alone, and the v
            of `host_kv` stay as they are.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_dtype("qkv", qkv)
    n, device, dtype = len(qkv), qkv.device, qkv.dtype
    head_dim = head_dim or cos.shape[-1]
    num_heads = qkv.shape[1] // head_dim
    num_qo_heads = num_heads - 2 * num_kv_heads
    check_head_dim(head_dim)
    if num_kv_heads:
        check_group(num_qo_heads, num_kv_heads)
    check_tensor("qkv", qkv, (n, num_heads * head_dim), dtype, device)
    rotary_dim = check_rotary_dim(cos, head_dim)
    check_tensor("cos", cos, (n, rotary_dim), dtype, device)
    check_tensor("sin", sin, (n, rotary_dim), dtype, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    query_shape, kv_shape = (n, num_qo_heads * head_dim), (n, 2, num_kv_heads, head_dim)
    check_tensor("query", query, query_shape, dtype, device)
    if host_query is not None:
        check_reachable("host_query", host_query, query_shape, dtype, device)
    if host_kv is not None:
        check_reachable("host_kv", host_kv, kv_shape, dtype, device)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    if q_norm is not None and k_norm is not None:
        check_tensor("q_norm", q_norm, (head_dim,), dtype, device)
        check_tensor("k_norm", k_norm, (head_dim,), dtype, device)
    if query_scale is not None:
        check_tensor("query_scale", query_scale, (n,), dtype, device)
    recent_tokens, row_dtype = 0, row_dtype or dtype
    parts = 1 if keys_only else 2
    if row_dtype not in (dtype, torch.int8):
        raise ValueError(f"row_dtype must be {dtype} or torch.int8, got {row_dtype}")
    row = row_items(head_dim, row_dtype)
    if window is not None:
        recent_tokens = window.shape[3] - sink_tokens
        if sink_tokens < 0 or recent_tokens < 0:
            raise ValueError(
                f"sink_tokens must be in [0, {window.shape[3]}], the window's tokens,"
                f" got {sink_tokens}"
            )
        window_shape = (n, parts, num_kv_heads, window.shape[3], row)
        check_tensor("window", window, window_shape, row_dtype, device)
    for name, table in (("page_table", page_table), ("host_pages", host_pages)):
        if table is not None:
            check_page_tokens(page_tokens)
            check_tensor(name, table, (n, table.shape[-1]), torch.int64, device)
    if page_slots is None:
        num_page_heads = num_kv_heads
    else:
        check_tensor("page_slots", page_slots, (num_kv_heads,), torch.int32, device)
        if not 1 <= num_page_heads <= num_kv_heads:
            raise ValueError(f"num_page_heads must be in [1, {num_kv_heads}], got {num_page_heads}")
    if ring_tokens < 0:
        raise ValueError(f"ring_tokens must not be negative, got {ring_tokens}")
    operands = (qkv, cos, sin, positions, q_norm, k_norm, norm_eps, query_scale)
    host = (host_query, host_kv)
    if not runs_kernel(qkv):
        page_shape = (parts, num_page_heads, page_tokens, row)
        return rope_publish_reference(
            *operands,
            query,
            *host,
            window,
            sink_tokens,
            page_table,
            page_shape,
            page_slots,
            ring_tokens,
            host_pages,
            row_dtype,
            head_dim,
        )
    rope_publish_kernel[(n, num_heads - num_kv_heads * keys_only)](
        *operands,
        query,
        *map(pointer, host),
        window,
        page_table,
        0 if page_table is None else page_table.shape[1],
        page_slots,
        host_pages,
        0 if host_pages is None else host_pages.shape[1],
        num_qo_heads,
        num_kv_heads,
        parts,
        num_page_heads,
        head_dim,
        rotary_dim,
        row,
        sink_tokens,
        recent_tokens,
        page_tokens,
        ring_tokens,
        next_power_of_2(head_dim // 2),
        num_warps=1,
        enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of a float32 product
    )


def rope_publish_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    query_scale: Tensor | None,
    query: Tensor,
    host_query: Tensor | None,
    host_kv: Tensor | None,
    window: Tensor | None,
    sink_tokens: int,
    page_table: Tensor | None,
    page_shape: tuple[int, int, int, int],
    page_slots: Tensor | None,
    ring_tokens: int,
    host_pages: Tensor | None,
    row_dtype: torch.dtype,
    head_dim: int,
) -> None:
    """`rope_publish` by torch; pages are CPU memory, those of `page_table` [*page_shape]."""
    parts, num_page_heads, page_tokens, row_width = page_shape
    heads = qkv.view(len(qkv), -1, head_dim)
    num_qo_heads = query.shape[1] // head_dim
    q, (k, v) = heads[:, :num_qo_heads], heads[:, num_qo_heads:].chunk(2, dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, norm_eps), rms_norm_reference(k, k_norm, norm_eps)
    q, k = rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
    if query_scale is not None:
        q = q * query_scale[:, None, None]
    kv = torch.stack((k, v)[:parts], dim=1)  # [n, parts, num_kv_heads, head_dim]

    rows = positions.ge(0).nonzero()[:, 0]
    for target in (query, host_query):
        if target is not None:
            target[rows] = q.flatten(1)[rows]
    if host_kv is not None:
        host_kv[rows, :parts] = kv[rows]
    kv = as_rows(kv, row_dtype)
    for row, position in zip(rows.tolist(), positions[rows].tolist(), strict=True):
        if window is not None:
            recent_tokens = window.shape[3] - sink_tokens
            index = position
            if position >= sink_tokens and recent_tokens:
                index = sink_tokens + (position - sink_tokens) % recent_tokens
            if index < window.shape[3]:
                window[row, :, :, index] = kv[row]
        if page_table is not None:
            place = position % ring_tokens if ring_tokens else position
            address = int(page_table[row, place // page_tokens])
            page = page_at(address, page_shape, row_dtype)
            held = slice(None) if page_slots is None else page_slots.argsort()[-num_page_heads:]
            page[:, :, place % page_tokens] = kv[row][:, held]
        if host_pages is not None:
            address = int(host_pages[row, position // page_tokens])
            page = page_at(address, (parts, kv.shape[2], page_tokens, row_width), row_dtype)
            page[:, :, position % page_tokens] = kv[row]
