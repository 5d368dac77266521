"""As much as fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n in [0, limit] that fits, where all below one that fits do, too."""
    low, high, step = 0, 0, 64
    while high < limit:  # by leaps first: what is large takes long to try
        high = min(high + step, limit)
        if not fits(high):
            break
        low, step = high, 2 * step
    else:
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
