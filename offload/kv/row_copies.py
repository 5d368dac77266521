"""Rows of one layer of a sequence, into its pages and out of them."""

from __future__ import annotations

from collections.abc import Iterable

from offload.kv.sequence_pages import Part
from offload.kv.transfer import Rows, copy_from_pages, copy_to_pages, runs_of


def write_rows(rows: Rows, parts: Iterable[Part]) -> None:
    """Keys and values [num_tokens, num_kv_heads, head_dim], which no head lacks."""
    keys, values = rows
    for heads, _, pieces in parts:
        for sides, pages in runs_of((keys[:, heads], values[:, heads]), pieces):
            for side, of_side in enumerate(sides):
                pages[:, side].copy_(of_side)


def write_rows_async(rows: Rows, parts: Iterable[Part]) -> None:
    """`write_rows` of rows on a CUDA device, in the order of the current stream."""
    keys, values = rows
    for heads, _, pieces in parts:
        copy_to_pages((keys[:, heads], values[:, heads]), pieces)


def read_rows(out: Rows, parts: Iterable[Part]) -> None:
    """Keys and values [num_kv_heads, num_tokens, head_dim], 0 where a head lacks the token. On a
    CUDA device they are filled in the order of the current stream."""
    for heads, num_lacking, pieces in parts:
        if num_lacking:
            for rows in out:
                rows[heads, :num_lacking] = 0
        keys, values = (rows[heads, num_lacking:].transpose(0, 1) for rows in out)
        if out[0].device.type != "cpu":
            copy_from_pages((keys, values), pieces)
            continue
        for sides, pages in runs_of((keys, values), pieces):
            for side, of_side in enumerate(sides):
                of_side.copy_(pages[:, side])
