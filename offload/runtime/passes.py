"""A forward pass over sequences of any lengths: all have its tokens afterwards, or none has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from offload.kv_compression.base import Exposed
from offload.runtime.correcting import Correction
from offload.runtime.sequences import Sequences


class Pass:
    """Reserve, compute, then commit or roll back.

    Args:
        seqs: handles, all distinct.
        num_new_tokens: of each; what its correction reads again is not counted.

    Attributes:
        seqs: those that get the tokens: copies in the place of sequences that are corrected.
        num_begun: tokens of each that the policy has not seen yet.
    """

    def __init__(
        self,
        sequences: Sequences,
        seqs: Sequence[int],
        num_new_tokens: Sequence[int],
        correction: Correction | None = None,
    ) -> None:
        self.seqs = list(seqs)
        self.num_begun = num_new_tokens
        if correction is not None:
            self.num_begun = correction.batch.num_new_tokens
        self._sequences, self._store = sequences, sequences.store
        self._num_new_tokens, self._correction = num_new_tokens, correction
        self._lens_before: list[int] = []
        self._lens_after: list[int] = []
        self._corrected: dict[int, int] = {}  # place to the sequence for which another stands

    def reserve(self, exposed: Exposed = contextlib.nullcontext) -> None:
        """Make room. Ctrl-C comes in what is `exposed`, as an error does.

        Raises:
            HostBudgetError: if it does not fit; nothing has changed then, but that sequences may
                have been condensed.
            RuntimeError: as `KVCompression.check_usable`.
        """
        num_read = self._num_new_tokens
        try:
            self._sequences.make_room(self.seqs, num_read, exposed)
            if self._correction is not None:
                num_read = self._correction.batch.num_new_tokens
                self._set_aside(self._correction)
            self._store.reserve(self.seqs, num_read)
        except BaseException:
            self._take_back()
            raise
        before = self._lens_before = [self._store.kv_len(seq) for seq in self.seqs]
        self._lens_after = [n + new for n, new in zip(before, num_read, strict=True)]

    def commit(self) -> None:
        """The tokens are in every layer of the store; of some it may know already."""
        ends = zip(self._lens_after, self.seqs, strict=True)
        self._store.commit(self.seqs, [after - self._store.kv_len(seq) for after, seq in ends])

    def end(self) -> None:
        """What comes after `commit` went well, too."""
        self._sequences.free(self._corrected.values())
        self._corrected.clear()

    def roll_back(self) -> None:
        """As before `reserve`, which went well, after anything that did not."""
        for seq, kv_len in zip(self.seqs, self._lens_before, strict=True):
            self._sequences.roll_back(seq, kv_len)
        self._take_back()

    def _set_aside(self, correction: Correction) -> None:
        """Go on with copies of sequences that are corrected."""
        for place, first in correction.firsts.items():
            copy = self._sequences.fork_to_read_again(self.seqs[place], first)
            self._corrected[place], self.seqs[place] = self.seqs[place], copy

    def _take_back(self) -> None:
        """Undo `_set_aside`."""
        for place, seq in self._corrected.items():
            self._sequences.free([self.seqs[place]])
            self.seqs[place] = seq
        self._corrected.clear()
