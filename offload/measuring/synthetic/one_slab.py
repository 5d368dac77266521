"""Host stores of made tokens, whose memory is taken at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from offload.kv.format import KVFormat
from offload.kv.store import KVStore
from offload.models.shape import ModelShape

PAGE_TOKENS = 256


def num_pages(num_tokens: int) -> int:
    """Pages of one layer of one sequence."""
    return -(-num_tokens // PAGE_TOKENS)


def page_bytes(heads: ModelShape | KVStore, dtype: torch.dtype, kv_dtype: str = "auto") -> int:
    """Bytes of one page of such heads."""
    row_bytes = KVFormat.of(kv_dtype, dtype).row_bytes(heads.head_dim)
    return 2 * heads.num_kv_heads * PAGE_TOKENS * row_bytes


def one_slab_store(
    heads: ModelShape | KVStore,
    dtype: torch.dtype,
    *,
    num_layers: int,
    pages: int,
    kv_dtype: str = "auto",
    pinned: bool = False,
    windows: int | Sequence[int] = 0,
) -> KVStore:
    """A store of such heads with room for `pages` pages of all layers together."""
    return KVStore(
        num_layers=num_layers,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_tokens=PAGE_TOKENS,
        slab_bytes=pages * page_bytes(heads, dtype, kv_dtype),
        pinned=pinned,
        windows=windows,
    )


def slab_memory(store: KVStore, seq: int, pages: int) -> torch.Tensor:
    """uint8 [num_bytes]: all `pages` pages, which are `seq`'s; not to be used after the store."""
    num_bytes = pages * store.page_bytes
    raw = (ctypes.c_uint8 * num_bytes).from_address(int(store.page_table(seq).min()))
    return torch.frombuffer(raw, dtype=torch.uint8)
