"""Few combinations of parameters in which all pairs of values meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Iterable[Any], together: int = 1) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis: of any two axes, every pair of values is in some row.

    The first `together` axes count as one: with `together=2`, every ISA and dtype meets every size.
    """
    kernels, *values = [*product(*axes[:together])], *([*axis] for axis in axes[together:])
    rows = [*product(*(range(len(axis)) for axis in (kernels, *values)))]
    pairs_of = {row: {*combinations(enumerate(row), 2)} for row in rows}
    left, chosen = set().union(*pairs_of.values()), []
    while left:
        best = max(rows, key=lambda row: len(pairs_of[row] & left))
        left -= pairs_of[best]
        chosen.append(best)
    return [
        (*kernels[i], *(axis[j] for axis, j in zip(values, rest, strict=True)))
        for i, *rest in chosen
    ]
