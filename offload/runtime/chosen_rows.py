"""What transformers calls to choose among the rows of a cache: of beams, and of several answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class ChosenRows(ABC):
    """Of a cache whose rows are sequences of a store.

    A cache that has no tokens yet has no rows to choose from and stays as it is. An IndexError for
    a row that does not exist leaves everything as it was.
    """

    _seqs: list[int]

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens and give their memory back."""

    @abstractmethod
    def _select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; all stays as it is if one cannot be forked."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; rows taken twice share their pages."""
        self._choose(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (int64, or a bool mask [batch_size])."""
        if indices.dtype == torch.bool:
            if self._seqs and len(indices) != len(self._seqs):
                raise IndexError(
                    f"a mask of {len(indices)} rows, but the cache has {len(self._seqs)}"
                )
            indices = indices.nonzero().squeeze(1)
        self._choose(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to each other; the copies share their pages."""
        if repeats < 0:
            raise ValueError(f"repeats must not be negative, got {repeats}")
        self._choose([row for row in range(len(self._seqs)) for _ in range(repeats)])

    def _choose(self, rows: list[int]) -> None:
        """As `_select`; negative rows count from the last. No rows: as new."""
        num_rows = len(self._seqs)
        for row in rows:
            if num_rows and not -num_rows <= row < num_rows:
                raise IndexError(f"row {row} of a cache of {num_rows} rows")
        if num_rows and rows:
            self._select([row % num_rows for row in rows])
        elif num_rows:
            self.reset()
