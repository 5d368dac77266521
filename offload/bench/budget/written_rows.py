"""Every key and value that a sequence ever had, whatever its cache keeps of them."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kv.store import KVStore


class WrittenRows:
    """Copied as they are written: [num_kv_heads, capacity_tokens, head_dim] of each layer."""

    def __init__(self, store: KVStore, prompt_seq: int, capacity_tokens: int) -> None:
        self._store, num_tokens = store, store.kv_len(prompt_seq)
        shape = (store.num_kv_heads, capacity_tokens, store.head_dim)
        self._rows = [
            tuple(torch.empty(shape, dtype=store.dtype) for _ in range(2))
            for _ in range(store.num_layers)
        ]
        self._lens = [num_tokens] * store.num_layers
        for layer_idx, kept in enumerate(self._rows):
            for rows, held in zip(kept, store.gather(prompt_seq, layer_idx), strict=True):
                rows[:, :num_tokens] = held

    def add_newest(self, seq: int, layer_idx: int, kv_len: int) -> None:
        """The last of the `kv_len` rows that the cache has of the sequence."""
        newest = self._store.gather(seq, layer_idx, kv_len - 1, kv_len)
        for rows, of_token in zip(self._rows[layer_idx], newest, strict=True):
            rows[:, self._lens[layer_idx]] = of_token[:, 0]
        self._lens[layer_idx] += 1

    def kv_len(self, layer_idx: int) -> int:
        """Tokens so far."""
        return self._lens[layer_idx]

    def held(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """(keys, values), [num_kv_heads, num_tokens, head_dim], the store's dtype."""
        keys, values = (rows[:, : self._lens[layer_idx]] for rows in self._rows[layer_idx])
        return keys, values
