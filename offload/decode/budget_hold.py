"""Holds the tokens that heads attend to at a mean, by the share of the attention they keep.

HARD-KV (arXiv 2606.28831) gives all heads and layers one share p, and how many tokens that takes
depends on the text. Where memory bandwidth or time is what there is so much of, p has to give. It
changes between steps only: inside one no head waits for what another one has taken, and a captured
graph stays as it is. Each step's mean says how far off p was; the log of the tokens is about linear
in the log-odds of p, so that a fixed part of the error in the one is taken off the other.
"""

from __future__ import annotations

import math
from typing import Protocol

LEAST_SHARE = 0.5
_MOST_SHARE = 1.0 - 1e-6  # of a policy that would cut nothing
_GAIN = 0.5  # of the log-odds by the log of the tokens; 2 would swing for ever


class Cuts(Protocol):
    """Selections that end at a share of the attention weight; `DecodeAttention.native`."""

    def set_top_p(self, top_p: float) -> None: ...

    def take_chosen(self) -> tuple[int, int]: ...


class BudgetHold:
    """One model's, over all of its sequences.

    Args:
        top_p: the largest share, with which each generation begins.
        mean_tokens: of a KV head, sinks and recent window included; where `LEAST_SHARE` takes
            more, there are more.

    Attributes:
        top_p: of the next step.
    """

    def __init__(self, cuts: Cuts, top_p: float, mean_tokens: int) -> None:
        self._cuts, self._mean_tokens = cuts, mean_tokens
        self._most = _log_odds(min(top_p, _MOST_SHARE))
        self._least = min(_log_odds(LEAST_SHARE), self._most)
        self.restart()

    def restart(self) -> None:
        """As for the first step: what comes does not depend on what was."""
        self._cuts.take_chosen()
        self._use(self._most)

    def after_step(self) -> None:
        """Take the mean of the step that is done into account."""
        num_units, num_tokens = self._cuts.take_chosen()
        if num_units:
            error = math.log(self._mean_tokens * num_units / num_tokens)
            self._use(min(max(self._at + _GAIN * error, self._least), self._most))

    def _use(self, log_odds: float) -> None:
        self._at = log_odds
        self.top_p = 1.0 / (1.0 + math.exp(-log_odds))
        self._cuts.set_top_p(self.top_p)


def _log_odds(share: float) -> float:
    return math.log(share / (1.0 - share))
