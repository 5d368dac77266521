"""Rows of keys and values between a device and pages of host memory, on the current stream.

A page is [K|V, num_kv_heads, page_tokens, head_dim]; rows on the device are [num_tokens,
num_kv_heads, head_dim] of any strides. Rows are rearranged on the device, so that every transfer is
one contiguous piece: torch moves anything else through pageable memory, and waits for it. With
pages in registered memory nothing here waits for the device.

Memory that is used here for a moment belongs to the current stream in torch's caching allocator:
the next piece gets it again, after the stream is done with it. Rows that other streams write or
free are the caller's to order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

STAGING_BYTES = 64 * 2**20  # device memory of a transfer under way; at least one page

# Of `SequencePages.pieces`: tokens first .. last, [n, K|V, num_kv_heads, tokens, head_dim].
Piece = tuple[int, int, Tensor]
Rows = tuple[Tensor, Tensor]  # keys, values: each [num_tokens, num_kv_heads, head_dim]


def copy_to_pages(rows: Rows, pieces: Iterable[Piece]) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_dim]; pieces count from the first."""
    for first, last, pages in pieces:
        if not pages.is_contiguous():
            for side, of_side in enumerate(rows):
                packed = of_side[first:last].transpose(0, 1).contiguous()
                for kv_head, strip in enumerate(packed):
                    pages[0, side, kv_head].copy_(strip, non_blocking=True)
            continue
        tokens = pages.shape[3]
        for start, run in _batches(pages):
            staging = torch.empty(run.shape, dtype=run.dtype, device=rows[0].device)
            begin = first + start * tokens
            for side, of_side in enumerate(rows):
                piece = of_side[begin : begin + len(run) * tokens]
                piece = piece.view(len(run), tokens, *piece.shape[1:])
                staging[:, side].copy_(piece.transpose(1, 2))
            run.copy_(staging, non_blocking=True)


def copy_from_pages(rows: Rows, pieces: Iterable[Piece]) -> None:
    """Read keys and values [num_tokens, num_kv_heads, head_dim]; pieces count from the first."""
    device = rows[0].device
    for first, last, pages in pieces:
        if not pages.is_contiguous():
            for side, of_side in enumerate(rows):
                packed = torch.empty(pages.shape[2:], dtype=pages.dtype, device=device)
                for kv_head, strip in enumerate(packed):
                    strip.copy_(pages[0, side, kv_head], non_blocking=True)
                of_side[first:last].copy_(packed.transpose(0, 1))
            continue
        tokens = pages.shape[3]
        for start, run in _batches(pages):
            staging = torch.empty(run.shape, dtype=run.dtype, device=device)
            staging.copy_(run, non_blocking=True)
            begin = first + start * tokens
            for side, of_side in enumerate(rows):
                piece = of_side[begin : begin + len(run) * tokens]
                piece = piece.view(len(run), tokens, *piece.shape[1:])
                piece.copy_(staging[:, side].transpose(1, 2))


def _batches(pages: Tensor) -> Iterable[tuple[int, Tensor]]:
    """(first page, pages) of `pages` in pieces of about STAGING_BYTES."""
    size = max(1, STAGING_BYTES // pages[0].nbytes)
    return ((start, pages[start : start + size]) for start in range(0, len(pages), size))
