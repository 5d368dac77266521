"""Checks of what the KV store is given; each raises ValueError."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from offload.kv.page_pool import Int64Array
from offload.kv.sequence_pages import SequencePages
from offload.kv.transfer import Rows

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_sizes(**sizes: int) -> None:
    """Checks sizes of a store, or of a layer's heads."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if sizes.get("head_dim", 0) % 8:
        raise ValueError(f"head_dim must be a multiple of 8, got {sizes['head_dim']}")


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        available = ", ".join(str(dtype) for dtype in _DTYPES)
        raise ValueError(f"the KV store has no dtype {dtype}; available: {available}")


def check_new_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Both [num_new_tokens, num_kv_heads, head_dim]."""
    expected = (keys.shape[0] if keys.ndim else 0, num_kv_heads, head_dim)
    for name, rows in (("keys", keys), ("values", values)):
        if tuple(rows.shape) != expected:
            raise ValueError(
                f"{name} must be [num_new_tokens, num_kv_heads, head_dim] = {list(expected)}, "
                f"got {list(rows.shape)}"
            )
        if rows.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {rows.dtype}")


def check_lens(
    lens: npt.NDArray[np.integer], num_layers: int, num_kv_heads: int, page_tokens: int
) -> Int64Array:
    """`lens` as int64; ValueError unless they are numbers of tokens that `rewrite` takes."""
    lens = np.asarray(lens)
    if lens.shape != (num_layers, num_kv_heads) or not np.issubdtype(lens.dtype, np.integer):
        raise ValueError(
            "lens must be integers [num_layers, num_kv_heads] = "
            f"{[num_layers, num_kv_heads]}, got {lens.dtype} {list(lens.shape)}"
        )
    wrong = lens[(lens < 1) | (lens % page_tokens != 0)]
    if len(wrong):
        raise ValueError(
            f"lens must be multiples of page_tokens={page_tokens}, at least one, got {wrong[0]}"
        )
    return lens.astype(np.int64)


def check_out(out: Rows, expected: tuple[int, ...], dtype: torch.dtype) -> None:
    """What `gather` fills."""
    for rows in out:
        if tuple(rows.shape) != expected or rows.dtype != dtype:
            raise ValueError(
                f"out must be two tensors {dtype} {list(expected)}, "
                f"got {rows.dtype} {list(rows.shape)}"
            )


def check_writable(
    sequence: SequencePages, seq: int, layer_idx: int, start: int, stop: int
) -> None:
    """Positions start .. stop of a layer are reserved, no head lacks them, and no fork has them."""
    if not 0 <= start <= stop <= sequence.reserved_len:
        raise ValueError(
            f"positions {start}..{stop} of sequence {seq} are not reserved: it has "
            f"{sequence.reserved_len} positions; call reserve() before append()"
        )
    if start == stop:
        return
    first = int(sequence.starts[layer_idx].max())
    if start < first:
        raise ValueError(
            f"positions {start}..{stop} of sequence {seq} cannot be written to: a head of layer "
            f"{layer_idx} lacks the first {first}"
        )
    if sequence.is_shared(layer_idx, start, stop):
        raise ValueError(
            f"positions {start}..{stop} of sequence {seq} are in pages shared with a fork; "
            "truncate() to the first position to rewrite, then reserve()"
        )
