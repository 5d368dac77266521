"""`OffloadedCache`: the `past_key_values` of an offloaded model, a handle on store sequences.

It holds no keys and values. Every row of a batch is a sequence of the `KVStore` without its
padding, so that left-padded batches waste neither memory nor time; the cache remembers which
columns of each row were padding, because transformers counts them in `get_seq_length()`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from transformers import Cache

from offload.batch import RaggedBatch
from offload.interrupts import shielded
from offload.kv_store import KVStore
from offload.sequences import Sequences


class OffloadedCache(Cache):
    """The cached tokens of a batch: one sequence of the KV store per row.

    `generate()` makes one by itself. `model.new_cache()` makes one to keep across calls, and
    `copy.deepcopy` it to continue one prompt in several ways: copies share their pages.

    The sequences go with the object (their memory is free for the next forward pass), or at once
    by `reset()`.
    """

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(layers=[])
        self._sequences = sequences
        self._seqs: list[int] = []
        self._num_columns = 0
        self._padding: list[list[int]] = []  # columns that are padding, ascending, of each row
        self._lens_before: list[int] = []  # of `seqs`, since `reserve`
        weakref.finalize(self, sequences.free_later, self._seqs)

    @property
    def seqs(self) -> tuple[int, ...]:
        """Store handle of each row; empty before the first forward pass."""
        return tuple(self._seqs)

    @property
    def store(self) -> KVStore:
        """Where the keys and values are."""
        return self._sequences.store

    @property
    def kv_lens(self) -> list[int]:
        """Tokens of each row, without padding."""
        return [self.store.kv_len(seq) for seq in self._seqs]

    @property
    def num_pages(self) -> int:
        """Pages per layer that hold these tokens, pages shared between rows counted for each."""
        page_tokens = self.store.page_tokens
        return sum(-(-kv_len // page_tokens) for kv_len in self.kv_lens)

    # What the model calls around a forward pass.

    def reserve(self, batch: RaggedBatch) -> list[int]:
        """Make room for `batch`; returns the sequence of each of its rows without padding.

        Raises:
            HostBudgetError: if it does not fit; nothing has changed then.
        """
        self._sequences.collect()
        seqs = self._seqs or [self._sequences.new() for _ in range(batch.num_sequences)]
        try:
            self.store.reserve(seqs, batch.num_new_tokens)
        except BaseException:
            if not self._seqs:
                self._sequences.free(seqs)
            raise
        self._seqs[:] = seqs
        self._lens_before = self.kv_lens
        return list(seqs)

    def commit(self, batch: RaggedBatch) -> None:
        """The tokens of `batch` are in every layer of the store.

        Raises:
            HostBudgetError: no room for what rows that continue one sequence need each.
        """
        self.store.commit(self._seqs, batch.num_new_tokens)
        if batch.num_sequences < len(batch.sequence_of_row):
            self._select(batch.sequence_of_row)
        if not self._padding:
            self._padding = [[] for _ in self._seqs]
        batch_size, seq_len = batch.rows_shape
        if batch.num_tokens < batch_size * seq_len:
            for row, padding in enumerate(batch.padding_of_rows()):
                self._padding[row] += [self._num_columns + column for column in padding]
        self._num_columns += seq_len

    def roll_back(self) -> None:
        """As before `reserve`, after a forward pass or a commit that failed."""
        if self._num_columns == 0:
            self.reset()
        for seq, kv_len in zip(self._seqs, self._lens_before, strict=False):
            self._sequences.roll_back(seq, kv_len)

    def check_continues(self, batch_size: int, past_mask: torch.Tensor | None) -> None:
        """Refuse a batch that does not continue this cache.

        Args:
            past_mask: bool [batch_size, get_seq_length()], the attention mask of the cached
                columns, or None if all are attended to.

        Raises:
            ValueError: for another batch size, or a mask that hides other columns than those that
                were padding when they were cached: what is cached cannot be masked later.
        """
        if not self._seqs:
            return
        if batch_size != len(self._seqs):
            raise ValueError(
                f"input_ids has a batch size of {batch_size}, but past_key_values has "
                f"{len(self._seqs)} rows"
            )
        if past_mask is None:
            kv_lens = [self._num_columns] * batch_size
        else:
            kv_lens = past_mask.sum(dim=1).tolist()
        if kv_lens != self.kv_lens:
            raise ValueError(
                f"attention_mask attends to {kv_lens} cached tokens per row, but past_key_values "
                f"holds {self.kv_lens}; pass the mask that the tokens were cached with, extended"
            )

    # What transformers calls.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included: the same for all rows and layers."""
        return self._num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows until the budget of the store."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns after `query_length` new ones, 0)."""
        return self._num_columns + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns (transformers wants 0 or less)."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as 0 or less, got {tokens_to_remove}"
            )
        with shielded():
            self._num_columns = max(0, self._num_columns + int(tokens_to_remove))
            for seq, padding in zip(self._seqs, self._padding, strict=True):
                del padding[bisect_left(padding, self._num_columns) :]
                kv_len = self._num_columns - len(padding)
                if kv_len < self.store.kv_len(seq):
                    self._sequences.truncate(seq, kv_len)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; rows taken twice share their pages."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (int64, or a bool mask)."""
        rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, next to each other; the copies share their pages."""
        self._select([row for row in range(len(self._seqs)) for _ in range(repeats)])

    def reset(self) -> None:
        """Free all sequences; the cache is as new."""
        self._sequences.free(self._seqs)
        self._seqs.clear()
        self._num_columns = 0
        self._padding = []

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not for stock attention layers: they would need the keys and values as tensors."""
        raise NotImplementedError("OffloadedCache works with OffloadedModel only")

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward pass, as transformers has it."""
        return len(self._seqs) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._seqs)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    def __len__(self) -> int:
        """Number of layers."""
        return self.store.num_layers

    def __repr__(self) -> str:
        return f"OffloadedCache(kv_lens={self.kv_lens})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedCache:
        copied = OffloadedCache(self._sequences)
        with shielded():
            for seq in self._seqs:  # one by one: what there is goes with the copy if one fails
                copied._seqs.append(self._sequences.fork(seq))
        copied._padding = [list(padding) for padding in self._padding]
        copied._num_columns = self._num_columns
        return copied

    def __copy__(self) -> OffloadedCache:
        # A shallow copy would share handles that the first of the two to go frees.
        return self.__deepcopy__({})

    def _select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; all stays as it is if one cannot be forked."""
        taken: set[int] = set()
        seqs: list[int] = []
        forks: list[int] = []
        with shielded():
            try:
                for row in rows:
                    seq = self._seqs[row]
                    if row in taken:
                        seq = self._sequences.fork(seq)
                        forks.append(seq)
                    seqs.append(seq)
                    taken.add(row)
            except BaseException:
                self._sequences.free(forks)
                raise
            self._sequences.free(seq for row, seq in enumerate(self._seqs) if row not in taken)
            self._seqs[:] = seqs
            if self._padding:
                self._padding = [list(self._padding[row]) for row in rows]
