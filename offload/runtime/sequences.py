"""The life of cached sequences: the store's pages and all other state of them change together."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offload.decode.attention import DecodeAttention
from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.kv_compression.base import Exposed, KVCompression
from offload.models.batch import RaggedBatch
from offload.runtime.correcting import (
    Background,
    Corrections,
    RunningCorrection,
    SparseTokens,
)
from offload.runtime.file_parts import RowsOnDisk
from offload.runtime.policy_part import PolicyPart
from offload.runtime.run_lock import RunLock
from offload.runtime.stats import OffloadStats
from offload.selection.state import PolicyStates
from offload.system.interrupts import shielded


class Sequences:
    """Makes, forks, shortens and frees the sequences of one model.

    The store gives out their handles, so its pages come first and go last. The other state is in
    `parts`, each of which may use what the parts before it have of a sequence: `fork`, `save` and
    `load` go down the list, and what takes something away goes up. So a correction in the
    background lets go of tokens before a GPU does, and a GPU before the policy.

    Args:
        decoder: the part that knows what a GPU has of sequences.
        compression: keeps each sequence within a bound; None: they have none.
        delimiter_classes: uint8 [vocab_size], what the text of each token ends with, where the
            policy wants to know.
        corrections: of what is decoded sparsely; None: there are none.
        has_ranks: other processes have the other heads of each sequence.
        fingerprint: of what a saved sequence depends on.

    Attributes:
        parts: all that has state of a sequence, but for the store.
        run_lock: which the caller has, except for `free_later` and `collect_if_idle`.
        background: what is corrected beside decode steps.
        on_disk: which tokens are in parts of a session's file.
    """

    def __init__(
        self,
        store: KVStore,
        attention: DecodeAttention,
        decoder: SequencePart,
        compression: KVCompression[Any] | None = None,
        delimiter_classes: npt.NDArray[np.uint8] | None = None,
        corrections: Corrections | None = None,
        *,
        has_ranks: bool = False,
        fingerprint: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self.store = store
        self.compression = compression
        self.corrections = corrections
        self._delimiter_classes = delimiter_classes
        self._attention, self._decoder = attention, decoder
        self._unreachable: deque[int] = deque()
        self.background = Background(self.free)
        self._has_ranks, self.fingerprint = has_ranks, fingerprint
        self.run_lock = RunLock()
        self.on_disk = RowsOnDisk(store)
        policy = PolicyPart(attention)
        parts = policy, compression, corrections, decoder, self.background, self.on_disk
        self.parts: list[SequencePart] = [part for part in parts if part is not None]

    @property
    def states(self) -> PolicyStates:
        """What the policy remembers of them."""
        return self._attention.states

    def check_saves(self) -> None:
        """Refuse to save or to restore where more belongs to a sequence than a file has.

        Raises:
            NotImplementedError: names the option of the model.
        """
        of_ranks = "tensor_parallel_size" if self._has_ranks else None
        for name in (of_ranks, *(part.unsaved_option for part in self.parts)):
            if name is not None:
                raise NotImplementedError(
                    f"a cache of a model with {name} cannot be saved or loaded; leave it out"
                )

    def new(self) -> int:
        """An empty sequence."""
        return self.store.new_sequence()

    def fork(self, seq: int) -> int:
        """A copy of `seq` that shares its pages."""
        with self._new_fork(seq) as child:
            for part in self.parts:
                part.fork(seq, child)
        return child

    def select(self, seqs: list[int], rows: Sequence[int]) -> None:
        """Have seqs[i] become what seqs[rows[i]] was: forks of those that are there twice. Others
        are freed; all stays as it is if one cannot be forked."""
        taken: set[int] = set()
        chosen, forks = list[int](), list[int]()
        try:
            for row in rows:
                seq = seqs[row]
                if row in taken:
                    seq = self.fork(seq)
                    forks.append(seq)
                chosen.append(seq)
                taken.add(row)
        except BaseException:
            self.free(forks)
            raise
        self.free(seq for row, seq in enumerate(seqs) if row not in taken)
        seqs[:] = chosen

    def fork_prefix(self, seq: int, kv_len: int) -> int:
        """A copy of the first `kv_len` tokens of `seq`, to have others read behind them: what the
        policy keeps is built anew after that."""
        with self._new_fork(seq) as child:
            for part in self.parts:
                part.fork_text(seq, child)
            self.truncate(child, kv_len)
        return child

    def fork_to_read_again(self, seq: int, kv_len: int) -> int:
        """`fork_prefix` for what is read in the place of `seq`, with the same text."""
        with self._new_fork(seq) as child:
            self.store.truncate(child, kv_len)
            for part in self.parts:
                part.fork_text(seq, child)
        self._decoder.rebase(seq, kv_len, child)
        return child

    @contextlib.contextmanager
    def _new_fork(self, seq: int) -> Iterator[int]:
        """A copy of the pages of `seq`, which all parts forget after an error."""
        child = self.store.fork(seq)
        try:
            yield child
        except BaseException:
            self.free([child])
            raise

    def fork_to_correct(self, waiting: Mapping[int, SparseTokens]) -> dict[int, int]:
        """Copy of each sequence up to the tokens that wait, with room for these.

        Raises:
            HostBudgetError: there is no room.
        """
        copies: dict[int, int] = {}
        try:
            for seq, tokens in waiting.items():
                copies[seq] = self.store.fork(seq)
                self.store.truncate(copies[seq], tokens.first)
            self.store.reserve([*copies.values()], [len(x.ids) for x in waiting.values()])
        except BaseException:
            self.free(copies.values())
            raise
        return copies

    def end_correction(self, running: RunningCorrection) -> None:
        """Tokens are in the copies in every layer: their pages take the place of those that waited.
        The copies are gone afterwards, even if policies fail."""
        assert self.corrections is not None
        with shielded():
            if running is self.background.running:
                self.background.running = None
            try:
                while running.copies:
                    seq, copy = running.copies.popitem()
                    first, num_tokens = running.tokens[seq].first, len(running.tokens[seq].ids)
                    self.store.exchange(seq, copy, first, first + num_tokens)
                    self.free([copy])
                    self.corrections.note_corrected(seq, num_tokens)
                    self._decoder.rebase(seq, first, seq)
                    self.on_disk.rebase(seq, first, seq)
                    try:
                        self.states.revise(seq, first)
                    except BaseException:
                        self.states.rebuild(seq)
                        raise
            finally:
                self.free(running.copies.values())

    def give_up_correction(self, running: RunningCorrection) -> None:
        """Give back what it has taken: nothing of it is read."""
        with shielded():
            self.free(running.copies.values())
            running.copies, running.num_read = {}, 0

    def make_room(
        self,
        seqs: Sequence[int],
        num_new_tokens: Iterable[int],
        exposed: Exposed = contextlib.nullcontext,
    ) -> None:
        """Condense those of `seqs` that `num_new_tokens` more would take past the bound.

        `exposed` is as `KVCompression.condense` wants it.

        Raises:
            HostBudgetError: no room beside a fork's pages, or for queries; what was not condensed
                is as it was.
            RuntimeError: as `KVCompression.check_usable`.
        """
        if self.compression is None:
            return
        for seq in seqs:
            self.compression.check_usable(seq)
        self.compression.check_room(seqs)
        try:
            for seq, num_new in zip(seqs, num_new_tokens, strict=True):
                if self.compression.needs_room(seq, num_new):
                    self._decoder.forget(seq)
                    self.on_disk.forget(seq)
                    num_slots, bound = self.store.kv_len(seq), self.compression.bound
                    self.compression.condense(seq, exposed)
                    newest = self.compression.newest_query(seq)
                    if newest is not None:
                        self._attention.states.renumber(
                            seq, num_slots, bound.sinks, bound.recent, *newest
                        )
        finally:
            self.compression.give_back_memory()

    def note_text(
        self,
        batch: RaggedBatch,
        seqs: Sequence[int],
        tokens: Tensor | None,
        positions: Tensor | None = None,
    ) -> None:
        """What comes, before it is in the store: ids [num_tokens] for KV compression, and delimiter
        classes for the policy. A token whose id is not known counts as no delimiter.

        Args:
            positions: [num_tokens]; None: the next.
        """
        if self.compression is not None and self.compression.wants_tokens:
            ids = None if tokens is None else tokens.tolist()
            for sequence, start, stop in batch.spans():
                self.compression.record_tokens(
                    seqs[sequence],
                    stop - start,
                    None if ids is None else ids[start:stop],
                    None if positions is None else int(positions[start]),
                )
        if self._delimiter_classes is None:
            return
        if tokens is None:
            classes = np.zeros(batch.num_tokens, np.uint8)
        else:
            classes = self._delimiter_classes[tokens.numpy()]
        for sequence, start, stop in batch.spans():
            self._attention.states.append_delimiter_classes(seqs[sequence], classes[start:stop])

    def note_decoded(
        self,
        batch: RaggedBatch,
        seqs: Sequence[int],
        tokens: Tensor | None,
        positions: Tensor,
    ) -> None:
        """As `note_text`, of what is decoded, [num_tokens] each: it waits for a correction, but
        where a sequence attends to all."""
        self.note_text(batch, seqs, tokens, positions)
        if self.corrections is not None and tokens is not None:
            self.corrections.note(batch, seqs, tokens, positions, self.states.unasked)

    def count_condensed(self, stats: OffloadStats) -> float:
        """Note what was condensed since this was asked last; the seconds that it took."""
        if self.compression is None:
            return 0.0
        num_tokens, seconds = self.compression.take_counts()
        stats.condensed_tokens += num_tokens
        stats.condense_seconds += seconds
        return seconds

    def truncate(self, seq: int, kv_len: int) -> None:
        """Keep the first `kv_len` tokens, and nothing that is reserved.

        What a policy has learnt from tokens that go is forgotten, bit for bit, where they are of
        the last forward pass (a draft).
        """
        self.store.check_truncate(seq, kv_len)
        finish = [part.truncate(seq, kv_len) for part in reversed(self.parts)]
        self.store.truncate(seq, kv_len)
        for finish_part in finish:
            if finish_part is not None:
                finish_part()

    @property
    def is_cut_at_marks(self) -> bool:
        """Whether `truncate` takes only what `longest_cut` gives."""
        return any(part.is_cut_at_marks for part in self.parts)

    def mark(self, seq: int) -> None:
        """As `SequencePart.mark`."""
        for part in self.parts:
            part.mark(seq)

    def longest_cut(self, seq: int, kv_len: int) -> int:
        """The most of its first `kv_len` tokens that `truncate` can leave."""
        kv_len = min(part.longest_cut(seq, kv_len) for part in self.parts)
        return kv_len if kv_len >= self.store.least_kv_len(seq) else 0

    def bytes_at(self, kv_len: int) -> int:
        """Host bytes of a sequence of so many tokens, beside pages and policy."""
        return sum(part.bytes_at(kv_len) for part in self.parts)

    def device_bytes_at(self, kv_len: int) -> int:
        """As `SequencePart.device_bytes_at`."""
        return sum(part.device_bytes_at(kv_len) for part in self.parts)

    def device_left_bytes(self) -> int:
        """As `SequencePart.device_left_bytes`."""
        return min((part.device_left_bytes() for part in self.parts), default=sys.maxsize)

    def kept_bytes(self, seq: int) -> int:
        """Host bytes of a sequence as it is, beside pages and policy."""
        return sum(part.kept_bytes(seq) for part in self.parts)

    def roll_back(self, seq: int, kv_len: int) -> None:
        """As before a forward pass that failed, with `kv_len` tokens."""
        for part in reversed(self.parts):
            part.roll_back(seq, kv_len)
        self.store.truncate(seq, kv_len)

    def free(self, seqs: Iterable[int]) -> None:
        """Give the pages back, unless forks share them."""
        for seq in seqs:
            for part in reversed(self.parts):
                part.forget(seq)
            self.store.free(seq)

    def free_later(self, seqs: Iterable[int]) -> None:
        """For finalizers: the collector may run one in the middle of a store operation, and in a
        thread whose turn it is not."""
        self._unreachable.extend(seqs)

    def collect(self) -> None:
        """Free what `free_later` was given."""
        while self._unreachable:
            self.free([self._unreachable.popleft()])

    def collect_if_idle(self) -> None:
        """`collect`, unless another thread has its turn: it does so before its next step."""
        lock = self.run_lock.lock
        with shielded():  # or ctrl-C might leave the lock taken
            if lock.acquire(blocking=False):
                try:
                    self.collect()
                finally:
                    lock.release()
