"""The codes of a step's keys, into the pages that `top_k_codes` reads.

A key is read from the window of recent tokens, where `rope_publish` has written it. What becomes of
it says offload/policies/sketch/codes.py: less the mean, rotated, each dimension to the nearest of 2
or 4 levels, and a scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_ops.checks import (
    check_dims,
    check_head_dim,
    check_page_tokens,
    check_row_dtype,
    check_rows,
    check_tensor,
)
from gpu_ops.code_scores import code_page_bytes
from gpu_ops.cpu_pages import page_at
from gpu_ops.encode_codes import check_levels, codes_of, encoded
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.load_rows import load_row
from gpu_ops.row_format import as_numbers


@jit
def append_codes_kernel(
    window: tl.tensor,
    rotation: tl.tensor,
    means: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    inner_level: tl.tensor,
    outer_level: tl.tensor,
    outer: tl.tensor,
    max_pages: tl.tensor,
    FIRST_TOKEN: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    RECENT_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,  # of the window
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least HEAD_DIM
    BLOCK_R: tl.constexpr,  # rows of the rotation that are loaded together
) -> None:
    """One program per head with codes, and row."""
    page_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row)
    if position < FIRST_TOKEN:
        return

    index = position
    if position >= SINK_TOKENS:
        index = SINK_TOKENS + (position - SINK_TOKENS) % RECENT_TOKENS
    kv_head = row * PARTS * NUM_KV_HEADS + tl.load(heads + page_head)
    key = window + (kv_head * (SINK_TOKENS + RECENT_TOKENS) + index) * ROW_ITEMS
    mean = means + (row * NUM_HEADS + page_head) * HEAD_DIM
    e = tl.arange(0, BLOCK_D)
    x = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_R):
        d = first + tl.arange(0, BLOCK_R)
        inside = d < HEAD_DIM
        of_key = load_row(key, d, inside, HEAD_DIM, ROW_ITEMS)
        of_key -= tl.load(mean + d, mask=inside, other=0.0)
        both = inside[:, None] & (e < HEAD_DIM)[None, :]
        part = tl.load(rotation + d[:, None] * HEAD_DIM + e[None, :], mask=both, other=0.0)
        x += tl.sum(of_key[:, None] * part, 0)
    code, scale = codes_of(x[None, :], inner_level, outer_level, outer, HEAD_DIM, BITS)

    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    w = tl.arange(0, BLOCK_D * BITS // 8)[None, :]
    page = tl.load(page_table + row * max_pages + position // PAGE_TOKENS)
    token = page_head * PAGE_TOKENS + position % PAGE_TOKENS
    tl.store(page.to(tl.pointer_type(tl.uint8)) + token * WIDTH + w, code, mask=w < WIDTH)
    scales = (page + NUM_HEADS * PAGE_TOKENS * WIDTH).to(tl.pointer_type(tl.float32))
    tl.store(scales + token + tl.arange(0, 1), scale)


def append_codes(
    window: Tensor,
    rotation: Tensor,
    means: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    *,
    first_token: int,
    sink_tokens: int,
    levels: Sequence[float],
    outer: float,
    page_tokens: int,
) -> None:
    """Write the code and the scale of each row's last key, for some KV heads.

    Args:
        window: [n, 2, num_kv_heads, sink_tokens + recent_tokens, row], as `rope_publish` has it,
            at least one of its tokens a recent one.
        rotation, means, page_table, heads: as `top_k_codes` takes them.
        positions: int64 [n], each row's last token; of one before `first_token` nothing is written.
        levels: 2 or 4, ascending, of codes of 1 or 2 bits a dimension.
        outer: where the outer ones of 4 levels begin, of a standard normal distribution.
        page_tokens: a power of two.
    """
    check_row_dtype("window", window)
    check_dims("window", window, "[n, 2, num_kv_heads, tokens, row]")
    n, parts, num_kv_heads, tokens, _ = window.shape
    num_heads, device, head_dim = len(heads), window.device, rotation.shape[-1]
    check_head_dim(head_dim)
    check_page_tokens(page_tokens)
    bits = check_levels(levels)
    if not 0 <= sink_tokens < tokens:
        raise ValueError(f"sink_tokens must be in [0, {tokens}), got {sink_tokens}")
    if first_token < 0:
        raise ValueError(f"first_token must not be negative, got {first_token}")
    check_rows("window", window, (n, parts, num_kv_heads, tokens), head_dim, window)
    check_tensor("rotation", rotation, (head_dim, head_dim), torch.float32, device)
    check_tensor("means", means, (n, num_heads, head_dim), torch.float32, device)
    check_tensor("page_table", page_table, (n, page_table.shape[-1]), torch.int64, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    operands = (window, rotation, means, page_table, positions, heads)
    if not runs_kernel(window):
        return append_codes_reference(
            *operands, first_token, sink_tokens, levels, outer, page_tokens
        )
    append_codes_kernel[(num_heads, n)](
        *operands,
        float(levels[-2]),
        float(levels[-1]),
        float(outer),
        page_table.shape[1],
        first_token,
        sink_tokens,
        tokens - sink_tokens,
        parts,
        num_heads,
        num_kv_heads,
        head_dim,
        window.shape[4],
        bits,
        page_tokens,
        next_power_of_2(head_dim),
        16,
        num_warps=4,
        enable_fp_fusion=False,
    )


def append_codes_reference(
    window: Tensor,
    rotation: Tensor,
    means: Tensor,
    page_table: Tensor,
    positions: Tensor,
    heads: Tensor,
    first_token: int,
    sink_tokens: int,
    levels: Sequence[float],
    outer: float,
    page_tokens: int,
) -> None:
    """`append_codes` by torch; pages are CPU memory."""
    head_dim, num_heads, bits = len(rotation), len(heads), check_levels(levels)
    width = head_dim * bits // 8
    page_bytes = code_page_bytes(num_heads, page_tokens, head_dim, bits)
    for row, position in enumerate(positions.tolist()):
        if position < first_token:
            continue
        index = position
        if position >= sink_tokens:
            index = sink_tokens + (position - sink_tokens) % (window.shape[3] - sink_tokens)
        keys = as_numbers(window[row, 0, heads.long(), index], head_dim)
        x = (keys - means[row]) @ rotation
        codes, scales = encoded(x, levels, outer)
        page = page_at(int(page_table[row, position // page_tokens]), (page_bytes,), torch.uint8)
        split = num_heads * page_tokens * width
        page[:split].view(num_heads, page_tokens, width)[:, position % page_tokens] = codes
        of_tokens = page[split:].view(torch.float32).view(num_heads, page_tokens)
        of_tokens[:, position % page_tokens] = scales
