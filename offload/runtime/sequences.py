"""The life of cached sequences: pages of the store and the policy's state change together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offload.decode.attention import DecodeAttention
from offload.decode.draft_rows import attend_again
from offload.kv.store import KVStore
from offload.kv_compression.base import Exposed, KVCompression
from offload.models.batch import RaggedBatch
from offload.runtime.correcting import BackgroundCorrection, Correction, Corrections, SparseTokens
from offload.runtime.run_lock import RunLock
from offload.runtime.stats import OffloadStats
from offload.selection.state import PolicyStates
from offload.system.interrupts import shielded


class Sequences:
    """Makes, forks, shortens and frees the sequences of one model.

    Args:
        on_changed: told of each sequence that is freed, or goes on from something else.
        on_cropped: of each that keeps its first tokens, so many.
        on_rebased: of each whose first tokens, so many, another goes on from in its place.
        compression: keeps each sequence within a bound; None: they have none.
        delimiter_classes: uint8 [vocab_size], what the text of each token ends with, where the
            policy wants to know.
        corrections: of what is decoded sparsely; None: there are none.

    Attributes:
        run_lock: which the caller has, except for `free_later` and `collect_if_idle`.
        background: what is corrected beside decode steps; None: nothing.
        has_ranks: other processes have the other heads of each sequence.
        fingerprint: of what a saved sequence depends on.
    """

    def __init__(
        self,
        store: KVStore,
        attention: DecodeAttention,
        on_changed: Callable[[int], None] = lambda seq: None,
        on_cropped: Callable[[int, int], None] = lambda seq, kv_len: None,
        on_rebased: Callable[[int, int, int], None] = lambda seq, kv_len, to: None,
        compression: KVCompression[Any] | None = None,
        delimiter_classes: npt.NDArray[np.uint8] | None = None,
        corrections: Corrections | None = None,
    ) -> None:
        self.store = store
        self.compression = compression
        self.corrections = corrections
        self._delimiter_classes = delimiter_classes
        self._attention = attention
        self._on_changed, self._on_cropped = on_changed, on_cropped
        self._on_rebased = on_rebased
        self._unreachable: deque[int] = deque()
        self.background: BackgroundCorrection | None = None
        self.has_ranks = False
        self.fingerprint: Callable[[], dict[str, str]] = dict
        self.run_lock = RunLock()

    @property
    def states(self) -> PolicyStates:
        """What the policy remembers of them."""
        return self._attention.states

    def check_saves(self) -> None:
        """Refuse to save or to restore where more belongs to a sequence than a file has.

        Raises:
            NotImplementedError: names the option of the model.
        """
        options = {
            "tensor_parallel_size": self.has_ranks or None,
            "host_bytes_per_sequence": self.compression,
            "mean_tokens of hard_kv": self._attention.top_p_controller,
        }
        for name, value in options.items():
            if value is not None:
                raise NotImplementedError(
                    f"a cache of a model with {name} cannot be saved or loaded; leave it out"
                )

    def new(self) -> int:
        """An empty sequence."""
        return self.store.new_sequence()

    def fork(self, seq: int) -> int:
        """A copy of `seq` that shares its pages."""
        child = self.store.fork(seq)
        try:
            self._attention.states.fork(seq, child)
            if self.compression is not None:
                self.compression.fork(seq, child)
            if self.corrections is not None:
                self.corrections.fork(seq, child)
        except BaseException:
            self.free([child])
            raise
        return child

    def fork_prefix(self, seq: int, kv_len: int) -> int:
        """A copy of the first `kv_len` tokens of `seq`, to have others read behind them: what the
        policy keeps is built anew after that."""
        child = self.store.fork(seq)
        try:
            self.store.truncate(child, kv_len)
            self._attention.states.fork_text(seq, child)
            self._attention.states.truncate(child, kv_len)
        except BaseException:
            self.free([child])
            raise
        return child

    def fork_to_read_again(self, seq: int, kv_len: int) -> int:
        """`fork_prefix` for what is read in the place of `seq`, with the same text."""
        child = self.store.fork(seq)
        try:
            self.store.truncate(child, kv_len)
            self._attention.states.fork_text(seq, child)
        except BaseException:
            self.free([child])
            raise
        self._on_rebased(seq, kv_len, child)
        return child

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

    def take_corrected(self, seq: int, copy: int, num_tokens: int) -> None:
        """Replace the first `num_tokens` waiting tokens of `seq` by those of `copy`, which has them
        in every layer; `copy` is gone afterwards."""
        assert self.corrections is not None
        first = self.corrections.waiting(seq).first
        with shielded():
            self.store.exchange(seq, copy, first, first + num_tokens)
            self.free([copy])
            self.corrections.note_corrected(seq, num_tokens)
            self._on_rebased(seq, first, seq)
            try:
                self.states.revise(seq, first)
            except BaseException:
                self.states.rebuild(seq)
                raise

    def end_background(self) -> None:
        """All layers of it are there."""
        with shielded():
            running, self.background = self.background, None
            assert running is not None
            copies = running.copies.copy()
            try:
                while copies:
                    seq, copy = copies.popitem()
                    self.take_corrected(seq, copy, len(running.tokens[seq].ids))
            finally:
                self.free(copies.values())

    def give_up_background(self) -> bool:
        """What it has not read waits on; whether there was one."""
        with shielded():
            running, self.background = self.background, None
            if running is not None:
                running.layers.close()
                self.free(running.copies.values())
        return running is not None

    def _goes(self, seq: int, kv_len: int) -> None:
        """Give the background correction up if `seq` loses tokens that it reads: it keeps
        `kv_len`."""
        if self.background is not None and seq in self.background.tokens:
            tokens = self.background.tokens[seq]
            if kv_len < tokens.first + len(tokens.ids):
                self.give_up_background()

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
                    self._on_changed(seq)
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

    def correction(
        self, seqs: Sequence[int], batch: RaggedBatch, tokens: Tensor | None, *, decodes: bool
    ) -> Correction | None:
        """What a prompt, with the ids `tokens`, is read behind, if anything.

        Args:
            decodes: it is no prompt.

        Raises:
            ValueError: tokens are decoded whose ids are not known.
        """
        if self.corrections is None:
            return None
        if decodes and tokens is None:
            raise ValueError(
                "inputs_embeds in a decode step with cache_correction_every: what is decoded is "
                "read again by its ids; give input_ids, or leave cache_correction_every out"
            )
        return None if decodes else self.corrections.behind(seqs, batch)

    def note_decoded(
        self,
        batch: RaggedBatch,
        seqs: Sequence[int],
        tokens: Tensor | None,
        positions: Tensor,
        exact: Container[int] = (),
    ) -> None:
        """What is decoded next, [num_tokens] each, before it is in the store.

        Args:
            exact: numbers of `batch`'s sequences that attend to all: they need no correction.
        """
        if self.corrections is not None and tokens is not None:
            self.corrections.note(batch, seqs, tokens, positions, exact)

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
        self._goes(seq, kv_len)
        self._on_cropped(seq, kv_len)
        rows = self._attention.states.truncate(seq, kv_len)
        self.store.truncate(seq, kv_len)
        if rows is not None:
            attend_again(self._attention, seq, rows)

    def roll_back(self, seq: int, kv_len: int) -> None:
        """As before a forward pass that failed, with `kv_len` tokens."""
        self._goes(seq, 0)  # ctrl-C may have come in what goes on beside it
        self._on_changed(seq)
        self._attention.states.roll_back(seq)
        self.store.truncate(seq, kv_len)

    def free(self, seqs: Iterable[int]) -> None:
        """Give the pages back, unless forks share them."""
        for seq in seqs:
            self._goes(seq, 0)
            self._on_changed(seq)
            self._attention.states.forget(seq)
            if self.compression is not None:
                self.compression.forget(seq)
            if self.corrections is not None:
                self.corrections.forget(seq)
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
