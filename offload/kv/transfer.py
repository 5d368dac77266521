"""Rows of keys and values into pages of host memory and out of them, also from a device.

A page is [K|V, num_kv_heads, page_tokens, head_dim], of one head where heads are apart, and without
V where values are the first elements of keys: values are then read as their keys. Rows on the
device are [num_tokens, num_kv_heads, head_dim] of any strides, on the current stream. Rows are
rearranged on the device, so that every transfer is one contiguous piece: torch moves anything else
through pageable memory, and waits for it. With pages in registered memory nothing waits for it.

What comes in crosses the bus on a stream of its own, a run ahead of what is rearranged: beside long
kernels each rearrangement waits for a place among their blocks, and the bus would wait with it.

Memory that is used here for a moment belongs to the current stream in torch's caching allocator:
the next piece gets it again, after the stream is done with it. Rows that other streams write or
free are the caller's to order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from offload.kv.format import KVFormat

# Device memory of a run of pages under way, at least one page, and how many there are at a time.
STAGING_BYTES, STAGINGS = 32 * 2**20, 2

# Of `SequencePages.pieces`: tokens first .. last, [n, K|V, num_kv_heads, tokens, head_dim].
Piece = tuple[int, int, Tensor]
Rows = tuple[Tensor, Tensor]  # keys, values: each [num_tokens, num_kv_heads, head_dim]
# Of `SequencePages.parts`: heads, positions that they lack, pieces of the others.
Part = tuple[slice, int, Iterator[Piece]]


def write_rows(
    rows: Rows, parts: Iterable[Part], kv_format: KVFormat, *, waits: bool = True
) -> None:
    """Keys and values [num_tokens, num_kv_heads, head_dim] into pages; those that are lacking are
    not kept.

    Args:
        waits: False: rows are on a CUDA device, and are copied in the order of the current stream.
    """
    keys, values = rows
    for heads, num_lacking, pieces in parts:
        of_heads = keys[num_lacking:, heads], values[num_lacking:, heads]
        if waits:
            fill_pages(of_heads, pieces, kv_format)
        else:
            copy_to_pages(of_heads, pieces, kv_format)


def read_rows(out: Rows, parts: Iterable[Part], kv_format: KVFormat) -> None:
    """Keys and values [num_kv_heads, num_tokens, head_dim], 0 where a head lacks the token. On a
    CUDA device they are filled in the order of the current stream."""
    for heads, num_lacking, pieces in parts:
        if num_lacking:
            for rows in out:
                rows[heads, :num_lacking] = 0
        keys = out[0][heads, num_lacking:].transpose(0, 1)
        values = keys if out[1] is out[0] else out[1][heads, num_lacking:].transpose(0, 1)
        if out[0].device.type != "cpu":
            copy_from_pages((keys, values), pieces, kv_format)
            continue
        for sides, pages in runs_of((keys, values), pieces):
            _read(pages, sides, kv_format)


def fill_pages(rows: Rows, pieces: Iterable[Piece], kv_format: KVFormat) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_dim]; who calls waits for it."""
    for sides, pages in runs_of(rows, pieces):
        _write(sides, pages, kv_format)


def copy_to_pages(rows: Rows, pieces: Iterable[Piece], kv_format: KVFormat) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_dim]; pieces count from the first.
    Of int8 `rows` are afterwards as pages have them."""
    for sides, run in runs_of(rows, pieces):
        staging = torch.empty(run.shape, dtype=run.dtype, device=rows[0].device)
        _write(sides, staging, kv_format)
        if kv_format.is_int8:
            _read(staging, sides, kv_format)
        for host, part in _contiguous(run, staging):
            host.copy_(part, non_blocking=True)


def copy_from_pages(rows: Rows, pieces: Iterable[Piece], kv_format: KVFormat) -> None:
    """Read keys and values [num_tokens, num_kv_heads, head_dim]; pieces count from the first."""
    runs = runs_of(rows, pieces)
    for sides, staging in _staged_ahead(runs, rows[0].device) if rows[0].is_cuda else _staged(runs):
        _read(staging, sides, kv_format)


def _write(sides: list[Tensor], pages: Tensor, kv_format: KVFormat) -> None:
    for of_side, part in zip(sides, pages.unbind(1), strict=False):  # keys alone, perhaps
        kv_format.write(of_side, part)


def _read(pages: Tensor, sides: list[Tensor], kv_format: KVFormat) -> None:
    kv_format.read(pages[:, 0], sides[0])
    if sides[1] is not sides[0]:
        kv_format.read(pages[:, -1], sides[1])


def _staged(runs: Iterable[tuple[list[Tensor], Tensor]]) -> Iterator[tuple[list[Tensor], Tensor]]:
    for sides, run in runs:
        yield sides, run.contiguous()


def _staged_ahead(
    runs: Iterable[tuple[list[Tensor], Tensor]], device: torch.device
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Runs on the device, while the one before is read in the order of the current stream."""
    current, copies = torch.cuda.current_stream(device), _copy_stream(device)
    known = list(runs)
    if not known:
        return
    # All at once: later ones could be what a conversion of rows has freed, and still works in.
    size, dtype = max(run.numel() for _, run in known), known[0][1].dtype
    free = [torch.empty(size, dtype=dtype, device=device) for _ in known[:STAGINGS]]
    copies.wait_stream(current)  # which may still use the memory that it gives us
    under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for sides, run in known:
        if free:
            memory = free.pop()
        else:
            memory, was_read = under_way.popleft()
            copies.wait_event(was_read)
        staging = memory[: run.numel()].view(run.shape)
        try:
            with torch.cuda.stream(copies):
                for host, part in _contiguous(run, staging):
                    part.copy_(host, non_blocking=True)
        finally:  # after ctrl-C, too: others get this memory then
            current.wait_stream(copies)
        yield sides, staging
        under_way.append((memory, current.record_event()))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def runs_of(rows: Rows, pieces: Iterable[Piece]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Keys' and values' part of `rows` [n, num_kv_heads, tokens, head_dim], and the host's pages
    [n, K|V, num_kv_heads, tokens, head_dim] that it belongs to, of about STAGING_BYTES.
    """
    for first, _, pages in pieces:
        tokens = pages.shape[3]
        size = max(1, STAGING_BYTES // pages[0].nbytes)
        for start in range(0, len(pages), size):
            run = pages[start : start + size]
            begin = first + start * tokens
            stop, shape = begin + len(run) * tokens, (len(run), tokens, *rows[0].shape[1:])
            keys = rows[0][begin:stop].view(shape).transpose(1, 2)
            values = rows[1][begin:stop].view(shape).transpose(1, 2)
            yield [keys, keys if rows[1] is rows[0] else values], run


def _contiguous(run: Tensor, staging: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Both in pieces that are contiguous: whole pages, or of a part of a page each head's rows."""
    if run.is_contiguous():
        return [(run, staging)]
    of_head = (-1, *run.shape[3:])
    return zip(run.view(of_head), staging.view(of_head), strict=True)


def all_finite(rows: torch.Tensor) -> bool:
    """Whether there is no NaN or infinity in `rows`."""
    # Either makes every sum it is in non-finite, and sums run at memory speed; isfinite over every
    # element is some ten times slower, so it only decides when a sum overflowed.
    if bool(torch.isfinite(rows.sum(dim=-1)).all()):
        return True
    return bool(torch.isfinite(rows).all())
