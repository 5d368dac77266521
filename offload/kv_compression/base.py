"""What keeps the sequences of one store within a bound, however it chooses what goes."""

from __future__ import annotations

import abc
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.kv_compression.bound import SequenceBound
from offload.system.memory import give_back_free_memory

_MUCH_BYTES = 2**20

Exposed = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class SequenceTokens:
    """What became of the tokens of a sequence, in every KV head, or on average.

    Attributes:
        seen: by the model.
        kept: that are in the cache as they were.
        condensed: slots that the others have become.
    """

    seen: int
    kept: int
    condensed: int


@dataclass
class Record:
    """A sequence's tokens that have no slot of their own any more, slots that are condensed, and
    from where on slots are tokens one after the other."""

    dropped: int = 0
    condensed: int = 0
    exact_from: int = 0
    is_broken: bool = False  # writing to its pages failed half way


R = TypeVar("R", bound=Record)


class KVCompression(SequencePart, abc.ABC, Generic[R]):
    """Keeps the sequences of one store within `bound`.

    Attributes:
        wants_tokens: new tokens are to be recorded before they are in the store.
        observes_queries: queries are to be recorded.
    """

    wants_tokens = False
    observes_queries = False
    unsaved_option = "host_bytes_per_sequence"

    def __init__(self, bound: SequenceBound, store: KVStore, new_record: Callable[[], R]) -> None:
        self.bound = bound
        self._store = store
        self._records: defaultdict[int, R] = defaultdict(new_record)
        self._condensed_tokens, self._seconds, self._took_bytes = 0, 0.0, 0

    # What a sequence is.

    def dropped(self, seq: int) -> int:
        """Tokens seen less slots."""
        return self._records[seq].dropped if seq in self._records else 0

    def used(self, seq: int) -> int:
        """Slots of `seq` that count against the bound."""
        return self._store.kv_len(seq)

    def tokens(self, seq: int) -> SequenceTokens:
        """What became of the tokens of `seq`."""
        condensed = self._records[seq].condensed if seq in self._records else 0
        seen = self._store.kv_len(seq) + self.dropped(seq)
        return SequenceTokens(seen, self.used(seq) - condensed, condensed)

    def take_counts(self) -> tuple[int, float]:
        """Tokens that have lost their slots, and the seconds it took, since this was asked last."""
        counts = self._condensed_tokens, self._seconds
        self._condensed_tokens, self._seconds = 0, 0.0
        return counts

    def check_truncate(self, seq: int, kv_len: int) -> None:
        """Refuse to cut `seq` to `kv_len` slots where these are not its first tokens.

        Raises:
            ValueError: tokens that would be the last are condensed.
        """
        record = self._records.get(seq)
        if record is not None and kv_len < record.exact_from:
            raise ValueError(
                f"cannot crop a sequence of {self._store.kv_len(seq) + record.dropped} tokens to "
                f"{kv_len + record.dropped}: the first {record.exact_from + record.dropped} were "
                "condensed to stay within host_bytes_per_sequence; start a new cache, or raise it"
            )

    @abc.abstractmethod
    def fork(self, seq: int, child: int) -> None: ...

    def forget(self, seq: int) -> None:
        self._records.pop(seq, None)

    # What it takes in addition to pages, within the budget of the store.

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Bytes that are held for all sequences."""

    @abc.abstractmethod
    def bytes_needed(
        self, num_rows: int, seqs: Sequence[int], num_tokens: int = sys.maxsize
    ) -> int:
        """That `num_rows` sequences of at most `num_tokens`, among them `seqs`, will take beyond
        now."""

    def check_room(self, seqs: Sequence[int]) -> None:
        """Have room for what `seqs` take.

        Raises:
            HostBudgetError: it does not fit; nothing has changed then.
        """
        what = "what is kept to condense sequences with host_bytes_per_sequence"
        need = self.bytes_needed(len(seqs), seqs)
        self._store.check_room(need, what, "lower the batch size")

    # What it sees.

    def record_tokens(
        self, seq: int, num_tokens: int, ids: Sequence[int] | None, position: int | None
    ) -> None:
        """Takes note of the tokens that will follow those in the store, where `wants_tokens`.

        Args:
            ids: None: only embeddings are known.
            position: of the first; None: the next.
        """

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Queries [num_qo_heads, n, head_dim] of one layer, of the last n of `kv_len` slots."""

    def wants_queries(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Whether `record_step` would keep any, of rows of one token each."""
        return False

    def record_step(self, step: DecodeStep, layer_idx: int | slice, queries: Tensor) -> None:
        """Queries [(layers,) n, num_qo_heads * head_dim] of the rows of a step."""

    # Making room.

    def check_usable(self, seq: int) -> None:
        """Refuse a sequence of which only some layers are condensed.

        Raises:
            RuntimeError: an error came while it was written to.
        """
        if seq in self._records and self._records[seq].is_broken:
            raise RuntimeError(
                "an error came while the tokens of this cache were condensed to stay within "
                "host_bytes_per_sequence, and its layers no longer have the same; start a new cache"
            )

    def needs_room(self, seq: int, num_new: int) -> bool:
        """Whether `num_new` more tokens would exceed the bound."""
        return num_new > 0 and self.used(seq) + num_new > self.bound.slots

    def room(self, seq: int, num_new: int) -> int:
        """How many of `num_new` tokens can come next, after condensing if that is worth it."""
        free = self.bound.slots - self.used(seq)
        return max(free, self.bound.freed) if num_new > free else num_new

    def condense(self, seq: int, exposed: Exposed = contextlib.nullcontext) -> None:
        """Bring `seq` down to `bound.low` slots.

        Args:
            exposed: of the `shielded` part that the caller is in: around what only computes.

        Raises:
            HostBudgetError: forks have its pages, and there is no room for others; nothing has
                changed then.
        """
        start, before = time.perf_counter(), self.used(seq)
        self._condense(seq, exposed)
        self._condensed_tokens += before - self.used(seq)
        self._seconds += time.perf_counter() - start

    @abc.abstractmethod
    def _condense(self, seq: int, exposed: Exposed) -> None: ...

    def newest_query(self, seq: int) -> tuple[Tensor, int] | None:
        """[num_layers, num_qo_heads, 0 or 1, head_dim] of the last token whose query is known, and
        of how many slots it is; None where queries are not recorded."""
        return None

    def give_back_memory(self) -> None:
        """What condensing took since the last time goes back to the system, where it was much: the
        allocator keeps it otherwise, beside the bound. All of the heap is walked for it."""
        took_bytes, self._took_bytes = self._took_bytes, 0
        if took_bytes > _MUCH_BYTES:
            start = time.perf_counter()
            give_back_free_memory()
            self._seconds += time.perf_counter() - start
