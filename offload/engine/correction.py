"""A correction of a request's cache in slices, between which others decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class SlicedCorrection:
    """Tokens that are read again into a copy of a sequence, which then takes its place.

    Attributes:
        first: tokens of the sequence that stay.
        ids: those behind them, which were decoded sparsely, and the next one.
        num_read: of `ids`, into the copy.
        copy: shares the pages of the tokens that stay; None: nothing was read yet.
    """

    first: int
    ids: list[int]
    num_read: int = 0
    copy: int | None = None

    @property
    def num_left(self) -> int:
        """Tokens that have to be read."""
        return len(self.ids) - self.num_read
