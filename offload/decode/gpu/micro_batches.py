"""How many micro-batches the rows of a step should be cut into: by measurement.

Two of them let the host attend for one while the device computes for the other, but every weight is
read twice. Which is faster depends on the policy, the lengths, the batch and the machine, and
changes as contexts grow. So the steps themselves are timed: a few in each way, then the faster way
for a long time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_SETTLED_STEPS = 16  # before the first trial: short answers are not worth one
_TRIAL_STEPS = 5  # of each way; its first one, which may be captured, does not count
_KEPT_STEPS = 1024  # until the next trial
# As many steps to come are worth a trial, for which all ways are captured before the first.
WORTH_A_TRIAL_STEPS = 64


class MicroBatchChoice:
    """Chooses among `options`, the first of which is used until there is something to compare.

    Args:
        agree: what all that take part in the steps make of each one's choice: with ranks, rank 0's.

    Attributes:
        options: all of them.
        num_micro_batches: for the next step.
    """

    def __init__(self, options: Sequence[int], agree: Callable[[int], int] = int) -> None:
        self.num_micro_batches = options[0]
        self._agree = agree
        self.options = tuple(options)
        self._times: dict[int, list[float]] = {}
        self._steps_until_trial = _SETTLED_STEPS

    @property
    def settled_steps(self) -> int | None:
        """Steps that are certain to be as the next one; None: all."""
        return None if len(self.options) == 1 else self._steps_until_trial

    def record(self, num_micro_batches: int, seconds: float) -> None:
        """A step in `num_micro_batches` took so long."""
        if len(self.options) == 1 or num_micro_batches != self.num_micro_batches:
            return
        if self._steps_until_trial > 0:
            self._steps_until_trial -= 1
            if self._steps_until_trial == 0:
                self._times = {}
                self.num_micro_batches = self.options[0]
            return
        times = self._times.setdefault(num_micro_batches, [])
        times.append(seconds)
        if len(times) < _TRIAL_STEPS:
            return
        untried = [option for option in self.options if option not in self._times]
        if untried:
            self.num_micro_batches = untried[0]
            return
        self.num_micro_batches = self._agree(
            min(self._times, key=lambda option: float(np.median(self._times[option][1:])))
        )
        self._steps_until_trial = _KEPT_STEPS
