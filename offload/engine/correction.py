"""A correction of a request's cache in slices, between which others decode."""

from __future__ import annotations

from dataclasses import dataclass

from offload.runtime.correcting import SparseTokens


@dataclass(eq=False)
class SlicedCorrection:
    """Tokens that are read again into a copy of a sequence, whose pages then take the place of the
    old.

    Attributes:
        tokens: of the sequence, which waited.
        num_read: of these, into the copy.
        copy: shares the pages of the tokens before; None: nothing was read yet.
    """

    tokens: SparseTokens
    num_read: int = 0
    copy: int | None = None

    @property
    def num_left(self) -> int:
        """Tokens that have to be read."""
        return len(self.tokens.ids) - self.num_read
