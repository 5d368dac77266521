"""Decode attention on the worker pool, by addresses: the C++ object behind checked arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from offload.decode.attention import DecodeAttention
from cpu_ops.native import _rows
from cpu_ops.step_rows import DecodeStep
from offload.decode.attention import DecodeAttention


def attend_csr(
    attention: DecodeAttention,
    query: Tensor,
    pages: npt.NDArray[np.int64],
    kv_len: int,
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend one query token to an explicit CSR selection of one layer's cache.

    Args:
        attention: names the shapes, the pool and the kernels; its policy is not used.
        query: [1, num_qo_heads * head_dim].
        pages: int64 [num_pages], a row of `KVStore.page_table(seq)`.
        indptr: [num_kv_heads + 1], or [num_qo_heads + 1] for a selection per query head.
        indices: sorted unique tokens of each CSR row, in [0, kv_len).
        return_weights: also return the attention weights of the selection.

    Returns:
        o [num_qo_heads, head_dim], lse float32 [num_qo_heads] (-inf for an empty row), and per
        query head the weights over its row's tokens ([] unless asked for).
    """
    heads, kv_heads = attention.num_qo_heads, attention.store.num_kv_heads
    head_dim = attention.store.head_dim
    _rows("query", query, heads * head_dim, attention.store.dtype)
    offsets = np.ascontiguousarray(indptr, np.int64)
    tokens = np.ascontiguousarray(indices, np.int64)
    num_rows = len(offsets) - 1
    if num_rows not in (kv_heads, heads):
        raise ValueError(
            f"indptr must have {kv_heads + 1} or {heads + 1} entries, got {len(offsets)}"
        )
    if offsets[0] != 0 or bool((np.diff(offsets) < 0).any()):
        raise ValueError("indptr must start at 0 and not decrease")
    if offsets[-1] != len(tokens):
        raise ValueError(f"indptr ends at {offsets[-1]} but there are {len(tokens)} indices")
    if not 0 <= kv_len <= len(pages) * attention.store.page_tokens:
        raise ValueError(f"kv_len must be in the given pages, got {kv_len}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < kv_len:
        raise ValueError(f"indices must lie in [0, {kv_len})")
    starts = np.zeros(len(tokens), bool)
    starts[offsets[:-1][offsets[:-1] < len(tokens)]] = True
    if len(tokens) > 1 and bool(((np.diff(tokens) <= 0) & ~starts[1:]).any()):
        raise ValueError("indices of each row must be sorted and unique")
    out = torch.empty(heads, head_dim, dtype=query.dtype)
    lse = torch.empty(heads, dtype=torch.float32)
    per_row = heads // num_rows
    flat = torch.empty(len(tokens) * per_row if return_weights else 0, dtype=torch.float32)
    attention.native_csr(
        query.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        int(pages.ctypes.data),
        kv_len,
        offsets,
        tokens.astype(np.int32),
        flat.data_ptr() if return_weights and len(tokens) else 0,
    )
    weights: list[Tensor] = []
    if return_weights:
        for row in range(num_rows):
            n = int(offsets[row + 1] - offsets[row])
            first = int(offsets[row]) * per_row
            weights += list(flat[first : first + n * per_row].view(per_row, n))
    return out, lse, weights


def attend_csr_rows(
    attention: DecodeAttention,
    layer_idx: int,
    step: DecodeStep,
    query: torch.Tensor,
    out: torch.Tensor,
    indices: npt.NDArray[np.int32],
) -> None:
    """Attend the only row of `step` to `indices` int32 [num_kv_heads, tokens] of one layer."""
    num_kv_heads, tokens = indices.shape
    indptr = np.arange(num_kv_heads + 1, dtype=np.int64) * tokens
    pages = int(step.page_tables[0] + layer_idx * step.table_strides[0] * 8)
    attention.native_csr(
        query.data_ptr(),
        out.data_ptr(),
        0,
        pages,
        int(step.kv_lens[0]),
        indptr,
        indices.reshape(-1),
        0,
    )
