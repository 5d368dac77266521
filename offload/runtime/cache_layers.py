"""The layers of an `OffloadedCache` as transformers' code reads those of a stock cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offload.runtime.cache import OffloadedCache


class CachedLayer:
    """Copies of the keys and values of one layer, made when they are asked for."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: OffloadedCache, layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx

    @property
    def is_initialized(self) -> bool:
        return self._cache.is_initialized

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch_size, num_kv_heads, columns, head_dim] in host memory, rotated; zeros at padding.
        None before the first forward pass."""
        return self._gather()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return self._gather()[1] if self.is_initialized else None

    def get_seq_length(self) -> int:
        """Columns, padding included."""
        return self._cache.get_seq_length()

    def _gather(self) -> torch.Tensor:
        """[K|V, batch_size, num_kv_heads, columns, head_dim]."""
        store, attended = self._cache.store, self._cache.attended
        batch_size, columns = attended.shape
        shape = (2, batch_size, store.num_kv_heads, columns, store.head_dim)
        both = torch.zeros(shape, dtype=store.dtype)
        for row, seq in enumerate(self._cache.seqs):
            for side, tokens in enumerate(store.gather(seq, self._layer_idx)):
                both[side, row, :, attended[row]] = tokens
        return both
