"""A host KV cache of random tokens, larger than the CPU's caches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from offload.measuring.synthetic.one_slab import num_pages, one_slab_store, slab_memory
from offload.models.shape import ModelShape
from offload.system.machine import last_level_cache_bytes

_FILL_TOKENS = 16384


class AttentionCache:
    """One sequence of `kv_len` random tokens.

    Args:
        shape: whose KV heads it has.
        max_layers: as many layers are made as it takes to exceed the last level cache eight times,
            but not more than these.

    Attributes:
        seq: its handle in `store`.
        memory: uint8 [num_bytes], the pages of all layers.

    Raises:
        HostBudgetError: it does not fit.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        kv_len: int,
        dtype: torch.dtype,
        max_layers: int,
    ) -> None:
        self.kv_len = kv_len
        self.row_bytes = shape.head_dim * dtype.itemsize
        layer_bytes = 2 * shape.num_kv_heads * kv_len * self.row_bytes
        wanted = -(-8 * last_level_cache_bytes() // layer_bytes)
        self.num_layers = max(1, min(max_layers, wanted))
        pages = self.num_layers * num_pages(kv_len)
        self.store = one_slab_store(shape, dtype, num_layers=self.num_layers, pages=pages)
        self.seq = self.store.new_sequence()
        self._fill()
        self.memory = slab_memory(self.store, self.seq, pages)

    def close(self) -> None:
        """Give the memory back; `memory` must not be used any more."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.store.close()

    def random_query(self, num_qo_heads: int) -> torch.Tensor:
        """[1, num_qo_heads * head_dim], in the cache's dtype."""
        generator = torch.Generator().manual_seed(1)
        query = torch.randn(1, num_qo_heads * self.store.head_dim, generator=generator)
        return query.to(self.store.dtype)

    def random_selection(self, tokens: int, *, seed: int) -> npt.NDArray[np.int32]:
        """int32 [num_kv_heads, tokens]: sorted random tokens without repetition."""
        generator = np.random.default_rng(seed)
        rows = [
            np.sort(generator.choice(self.kv_len, tokens, replace=False))
            for _ in range(self.store.num_kv_heads)
        ]
        return np.stack(rows).astype(np.int32)

    def _fill(self) -> None:
        store = self.store
        store.reserve([self.seq], [self.kv_len])
        generator = torch.Generator().manual_seed(0)
        for start in range(0, self.kv_len, _FILL_TOKENS):
            num_new = min(_FILL_TOKENS, self.kv_len - start)
            shape = (num_new, store.num_kv_heads, store.head_dim)
            keys, values = (
                torch.randn(shape, generator=generator).to(store.dtype) for _ in range(2)
            )
            for layer_idx in range(store.num_layers):
                store.append(self.seq, layer_idx, keys, values, start=start)
        store.commit([self.seq], [self.kv_len])
