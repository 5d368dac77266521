"""As much as fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

Drawn = TypeVar("Drawn")


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


def grown(
    size: int, step: int, room: int, tokens_of: Callable[[int], int], most: int = sys.maxsize
) -> int:
    """RULER's first size: from `size` on in steps, but at most `most`, until one has more tokens
    than there is room for, and a step back; or just as many, and a step on."""
    tokens = 0
    while tokens < room:
        tokens = tokens_of(size)
        if tokens > room:
            return size - step
        size += step
        if size > most:
            return most
    return size


def first_fitting(
    draw: Callable[[int], Drawn], size: int, step: int, least: int, fits: Callable[[Drawn], bool]
) -> Drawn | None:
    """RULER's samples: draws of `size` and less, in steps down to `least`, until one fits; None if
    none does."""
    for smaller in range(size, least - 1, -step):
        drawn = draw(smaller)
        if fits(drawn):
            return drawn
    return None
