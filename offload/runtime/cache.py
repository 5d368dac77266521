"""`OffloadedCache`: the `past_key_values` of an offloaded model, a handle on store sequences.

It holds no keys and values. Every row of a batch is a sequence of the `KVStore` without its
padding, so that left-padded batches waste neither memory nor time; the cache remembers which
columns of each row were padding, because transformers counts them in `get_seq_length()`, and a
mask that hides others later would be wrong.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import Cache

from offload.kv.store import KVStore
from offload.kv_compression.base import Exposed, SequenceTokens
from offload.kv_compression.bound import SequenceBound
from offload.models.batch import RaggedBatch
from offload.runtime.chosen_rows import ChosenRows
from offload.runtime.correcting import Correction, Corrections
from offload.runtime.runner import Pass
from offload.runtime.saving import file_of, read_sequences
from offload.runtime.sequences import Sequences
from offload.system.interrupts import shielded


def check_offloaded(model: Any, *, takes_generic: bool = False) -> None:
    """Refuse what `OffloadedModel.from_pretrained` has not made, or without lean layers.

    Args:
        takes_generic: without them, too.

    Raises:
        TypeError, NotImplementedError: names it.
    """
    if not hasattr(model, "_offload"):
        raise TypeError(
            "the model must come from OffloadedModel.from_pretrained, got "
            f"{'None' if model is None else type(model).__name__}"
        )
    if not takes_generic:
        _ = model._offload.lean  # or that is refused


class OffloadedCache(ChosenRows, Cache):
    """The cached tokens of a batch: one sequence of the KV store per row.

    `generate()` makes one by itself. `model.new_cache()` makes one to keep across calls, and
    `copy.deepcopy` it to continue one prompt in several ways: copies share their pages.

    The sequences go with the object (their memory is free for the next forward pass), or at once
    by `reset()`.

    What changes a cache, or copies it, waits while another thread runs the model; a cache itself is
    for one thread at a time.
    """

    def __init__(self, sequences: Sequences) -> None:
        # Not Cache.__init__: it would keep layers, which are made when they are asked for here.
        self._sequences = sequences
        self._seqs: list[int] = []
        self._num_columns = 0
        # bool [rows, >= columns], False at padding; None: there was none so far.
        self._attended: torch.Tensor | None = None
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
        """Tokens in the store of each row, without padding."""
        return [self.store.kv_len(seq) for seq in self._seqs]

    @property
    def seen_lens(self) -> list[int]:
        """Tokens that each row has seen, those that were condensed included."""
        return [self.store.kv_len(seq) + self._dropped(seq) for seq in self._seqs]

    @property
    def tokens(self) -> list[SequenceTokens]:
        """What became of the tokens of each row."""
        compression = self._sequences.compression
        if compression is None:
            return [SequenceTokens(n, n, 0) for n in self.kv_lens]
        return [compression.tokens(seq) for seq in self._seqs]

    @property
    def bound(self) -> SequenceBound | None:
        """What each row may have in the store, if that is bounded."""
        compression = self._sequences.compression
        return None if compression is None else compression.bound

    def condensing_bytes(self, num_rows: int, num_tokens: int) -> int:
        """What is kept to condense `num_rows` rows of at most `num_tokens`, if they are bounded,
        beyond now."""
        compression = self._sequences.compression
        return (
            0 if compression is None else compression.bytes_needed(num_rows, self._seqs, num_tokens)
        )

    @property
    def corrections(self) -> Corrections | None:
        """What rows read again; None: nothing."""
        return self._sequences.corrections

    @property
    def attended(self) -> torch.Tensor:
        """bool [rows, columns], False at padding."""
        if self._attended is None:
            return torch.ones(len(self._seqs), self._num_columns, dtype=torch.bool)
        return self._attended[:, : self._num_columns]

    def take(self, *seqs: int) -> None:
        """Become a batch without padding: sequences of one length, which no other owner frees."""
        self.reset()
        self._seqs.extend(seqs)
        self._num_columns = self.store.kv_len(seqs[0]) + self._dropped(seqs[0])

    @torch.inference_mode(False)
    def save(self, path: str | Path) -> None:
        """Write all rows to a file in safetensors' format: keys and values, and what the policy
        keeps. `load` goes on from it with the same tokens. The file is there whole, or not at all.

        Raises:
            ValueError: the cache has no tokens.
            NotImplementedError: more belongs to the cache than its rows (ranks, a bound of bytes,
                mean_tokens).
            OSError: it cannot be written.
        """
        if not self._seqs:
            raise ValueError("the cache has no tokens to save")
        with self._sequences.run_lock.lock:
            attended = None if self._attended is None else self.attended
            for _ in file_of(self._sequences, self._seqs, attended=attended).write(Path(path)):
                pass

    @classmethod
    @torch.inference_mode(False)
    def load(cls, model: Any, path: str | Path) -> Any:
        """The cache of the model, as of `new_cache()`, that `save` has written to a file.

        Raises:
            SessionMiss: a file of another model, dtype, policy or version, one that is damaged or
                is none, or there is no room for it; the message says which.
            NotImplementedError: as `save`. TypeError: a stock model, or none.
        """
        check_offloaded(model, takes_generic=True)
        runtime = model._offload
        if hasattr(runtime, "load_cache"):
            return runtime.load_cache(Path(path))
        cache = cls(runtime.sequences)
        with runtime.run_lock.lock:
            runtime.sequences.collect()
            rows, attended = read_sequences(
                runtime.sequences, Path(path), runtime.lean.shape.max_context
            )
            cache._seqs.extend(row.seq for row in rows)
        if attended is not None:
            cache._attended, cache._num_columns = attended, attended.shape[1]
        elif rows:
            cache._num_columns = max(cache.kv_lens)
        return cache

    # What the model calls around a forward pass.

    def begin(self, batch: RaggedBatch, correction: Correction | None = None) -> CachePass:
        """A pass of `batch`, which continues the rows, or whose rows these become."""
        return CachePass(self, batch, correction)

    def check_continues(self, batch_size: int, past_mask: torch.Tensor | None) -> None:
        """Refuse a batch that does not continue this cache.

        Args:
            past_mask: bool [batch_size, get_seq_length()], the attention mask of the cached
                columns, or None if all are attended to.

        Raises:
            ValueError: for another batch size, or a mask that hides other columns than those that
                were padding when they were cached: what is cached cannot be masked later, and
                padding has no keys and values.
        """
        if not self._seqs:
            return
        if batch_size != len(self._seqs):
            raise ValueError(
                f"input_ids has a batch size of {batch_size}, but past_key_values has "
                f"{len(self._seqs)} rows"
            )
        if self._attended is None and (past_mask is None or past_mask.numpy().all()):
            return
        cached = self.attended
        if past_mask is None:
            past_mask = torch.ones_like(cached)
        if not np.array_equal(past_mask.numpy(), cached.numpy()):  # quicker than torch.equal
            row, column = (past_mask != cached).nonzero()[0].tolist()
            now, then = "attends to", "was padding"
            if cached[row, column]:
                now, then = "hides", "was attended to"
            raise ValueError(
                f"attention_mask {now} column {column} of row {row}, which {then} when it was "
                "cached; pass the mask that the tokens were cached with, extended"
            )

    # What transformers calls.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included: the same for all rows and layers."""
        return self._num_columns

    @property
    def layers(self) -> list[CachedLayer]:  # type: ignore[override]
        """Every layer, to read; their keys and values are copied from the store when asked for."""
        return [CachedLayer(self, layer_idx) for layer_idx in range(len(self))]

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, None]]:
        """(keys, values, None) of each layer, as of a `DynamicCache`."""
        for layer in self.layers:
            yield layer.keys, layer.values, None

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows until the budget of the store."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns after `query_length` new ones, 0)."""
        return self._num_columns + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns (transformers wants 0 or less).

        Raises:
            ValueError: for a positive number, or to where tokens were condensed, or where a layer
                has freed those before its window.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as 0 or less, got {tokens_to_remove}"
            )
        with self._sequences.run_lock.lock, shielded():
            if self._num_columns + int(tokens_to_remove) <= 0:
                self.reset()  # rows without a column are no rows: the next batch may have others
                return
            num_columns = self._num_columns + int(tokens_to_remove)
            seen_lens = [num_columns] * len(self._seqs)
            if self._attended is not None:
                seen_lens = self._attended[:, :num_columns].sum(dim=1).tolist()
            lens = [n - self._dropped(seq) for seq, n in zip(self._seqs, seen_lens, strict=True)]
            compression = self._sequences.compression
            for seq, kv_len in zip(self._seqs, lens, strict=True):
                if compression is not None:
                    compression.check_truncate(seq, kv_len)
                if kv_len < self.store.kv_len(seq):
                    self.store.check_truncate(seq, kv_len)
            self._num_columns = num_columns
            for seq, kv_len in zip(self._seqs, lens, strict=True):
                if kv_len < self.store.kv_len(seq):
                    self._sequences.truncate(seq, kv_len)

    def reset(self) -> None:
        """Free all sequences; the cache is as new."""
        with self._sequences.run_lock.lock, shielded():
            self._sequences.free(self._seqs)
            self._seqs.clear()
            self._num_columns = 0
            self._attended = None

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
        with self._sequences.run_lock.lock, shielded():
            for seq in self._seqs:  # one by one: what there is goes with the copy if one fails
                copied._seqs.append(self._sequences.fork(seq))
            copied._attended = None if self._attended is None else self._attended.clone()
            copied._num_columns = self._num_columns
        return copied

    def __copy__(self) -> OffloadedCache:
        # A shallow copy would share handles that the first of the two to go frees.
        return self.__deepcopy__({})

    def _dropped(self, seq: int) -> int:
        """Tokens that `seq` has seen less those in the store."""
        compression = self._sequences.compression
        return 0 if compression is None else compression.dropped(seq)

    def _select(self, rows: Sequence[int]) -> None:
        with self._sequences.run_lock.lock, shielded():
            self._sequences.select(self._seqs, rows)
            if self._attended is not None:
                with torch.inference_mode(False):
                    self._attended = self._attended[list(rows)]

    def _continue(self, batch: RaggedBatch) -> None:
        """The rows have the tokens of `batch`: of a sequence with several rows, each its own."""
        if batch.num_sequences < len(batch.sequence_of_row):
            self._select(batch.sequence_of_row)
        batch_size, seq_len = batch.rows_shape
        attended = None
        if batch.num_tokens < batch_size * seq_len:
            attended = batch.attended()
        self._note_columns(batch_size, seq_len, attended)
        self._num_columns += seq_len

    def _note_columns(self, batch_size: int, seq_len: int, attended: torch.Tensor | None) -> None:
        """`seq_len` more columns of `attended`, bool [batch_size, seq_len]; None: all True."""
        if self._attended is None:
            if attended is None or bool(attended.all()):
                return
            self._attended = torch.ones(batch_size, self._num_columns, dtype=torch.bool)
        end = self._num_columns + seq_len
        if end > self._attended.shape[1]:  # twice the room, so that growing stays rare
            room = torch.ones(batch_size, 2 * end - self._attended.shape[1], dtype=torch.bool)
            self._attended = torch.cat([self._attended, room], dim=1)
        self._attended[:, self._num_columns : end] = True if attended is None else attended


class CachePass(Pass):
    """A pass of a rectangular batch that continues a cache.

    A cache without rows gets new ones with it, and has none after an error.
    """

    def __init__(
        self, cache: OffloadedCache, batch: RaggedBatch, correction: Correction | None
    ) -> None:
        super().__init__(cache._sequences, cache._seqs, batch.num_new_tokens, correction)
        self._cache, self._batch, self._is_new = cache, batch, not cache._seqs

    def reserve(self, exposed: Exposed = contextlib.nullcontext) -> None:
        self._sequences.collect()
        if self._is_new:
            self.seqs = [self._sequences.new() for _ in range(self._batch.num_sequences)]
        try:
            super().reserve(exposed)
        except BaseException:
            if self._is_new:
                self._sequences.free(self.seqs)
            raise
        self._cache._seqs[:] = self.seqs

    def commit(self) -> None:
        """As `Pass.commit`; then the cache has its columns.

        Raises:
            HostBudgetError: no room for what rows that continue one sequence need each.
        """
        super().commit()
        self._cache._continue(self._batch)

    def roll_back(self) -> None:
        if self._is_new:
            self._cache.reset()
            self.seqs.clear()
            return
        super().roll_back()
        self._cache._seqs[:] = self.seqs


class CachedLayer:
    """A layer as transformers' code reads those of a stock cache: copies, made when asked for."""

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
        if any(row.condensed or row.seen > row.kept for row in self._cache.tokens):
            raise ValueError(
                "the tokens of this cache were condensed to stay within host_bytes_per_sequence: "
                "there are no keys and values of each column"
            )
        for seq in self._cache.seqs:
            if first := int(store.starts(seq)[self._layer_idx].max()):
                raise ValueError(
                    f"layer {self._layer_idx} sees a window, and has freed the keys and values of "
                    f"the first {first} tokens before it"
                )
        batch_size, columns = attended.shape
        num_kv_heads, head_dim = store.heads_of(self._layer_idx)
        shape = (2, batch_size, num_kv_heads, columns, head_dim)
        both = torch.zeros(shape, dtype=store.dtype)
        for row, seq in enumerate(self._cache.seqs):
            for side, tokens in enumerate(store.gather(seq, self._layer_idx)):
                both[side, row, :, attended[row]] = tokens
        return both
