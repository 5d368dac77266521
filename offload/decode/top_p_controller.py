"""Holds the tokens that heads attend to at a mean, by the share of the attention they keep.

HARD-KV (arXiv 2606.28831) gives all heads and layers one share p, and how many tokens that takes
depends on the text. Where memory bandwidth or time is what there is so much of, p has to give. It
changes between steps only: inside one no head waits for what another one has taken, and a captured
graph stays as it is. Each step's mean says how far off p was; the log of the tokens is about linear
in the log-odds of p, so that a fixed part of the error in the one is taken off the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Protocol

from offload.selection.policy import LEAST_SHARE

_MOST_SHARE = 1.0 - 1e-6  # of a policy that would cut nothing
_GAIN = 0.5  # of the log-odds by the log of the tokens; 2 would swing for ever


class Cuts(Protocol):
    """Selections that end at a share of the attention weight; `DecodeAttention.native`."""

    def hold_top_p(self, top_p: float) -> None: ...

    def take_chosen(self) -> tuple[int, int]: ...


class TopPController:
    """One model's, over all of its sequences.

    Args:
        top_p: the largest share, above `LEAST_SHARE`, with which each prompt begins; more where
            each of `group_size` query heads would not have half of its own.
        mean_tokens: of a KV head that selects, sinks and recent window included; where
            `LEAST_SHARE` takes more, there are more.

    Attributes:
        top_p: of the next step.
    """

    def __init__(self, cuts: Cuts, top_p: float, mean_tokens: int, group_size: int = 1) -> None:
        self._cuts, self._mean_tokens = cuts, mean_tokens
        most = max(top_p, (group_size - 0.5) / group_size)
        self._most, self._least = _log_odds(min(most, _MOST_SHARE)), _log_odds(LEAST_SHARE)
        self._last = self._at = self._most
        self.restart()

    def restart(self) -> None:
        """As for the first step: what comes does not depend on what was."""
        self._cuts.take_chosen()
        self._last = self._most
        self._use(self._most)

    def after_step(self) -> None:
        """Take the mean of the step that is done into account."""
        num_units, num_tokens = self._cuts.take_chosen()
        self._last = self._at
        if num_units:
            error = math.log(self._mean_tokens * num_units / num_tokens)
            self._use(min(max(self._at + _GAIN * error, self._least), self._most))

    @contextlib.contextmanager
    def as_last_step(self) -> Iterator[None]:
        """Attend inside as the step before has done it; it does not count."""
        at = self._at
        self._use(self._last)
        try:
            yield
        finally:
            self._cuts.take_chosen()
            self._use(at)

    def _use(self, log_odds: float) -> None:
        self._at = log_odds
        self.top_p = 1.0 / (1.0 + math.exp(-log_odds))
        self._cuts.hold_top_p(self.top_p)


def _log_odds(share: float) -> float:
    return math.log(share / (1.0 - share))
