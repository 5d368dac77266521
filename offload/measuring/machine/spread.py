"""How much timings of the same work differ: on a busy machine, more than a profile can bear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Spread:
    """Takes medians, and remembers the widest.

    Attributes:
        most: half of the timings lie within such a share of their median, of the widest.
    """

    most: float = 0.0

    def median(self, times: Sequence[float]) -> float:
        """The median of timings that count."""
        low, median, high = (float(t) for t in np.percentile(times, [25, 50, 75]))
        self.most = max(self.most, (high - low) / median if median else 0.0)
        return median
