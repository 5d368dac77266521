"""Parameters of which only some are tried by `make test`, and all by `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from cases.pairwise import pairwise

_PARAM = type(pytest.param())


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """`values` for `parametrize`, all but the `fast` ones marked as slow."""
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def combinations(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of values for `parametrize`; a value that is a tuple is of several names.

    All are slow but a few: of two axes those that have each value once, of more those in which each
    pair of values meets.
    """
    values = [[*axis] for axis in axes]
    numbers = [range(len(axis)) for axis in values]
    if len(axes) > 2:
        fast = {*pairwise(*numbers)}
    else:
        longest = max(map(len, numbers))
        fast = {tuple(i % len(axis) for axis in numbers) for i in range(longest)}
    rows = []
    for row in product(*numbers):
        chosen = [axis[i] for axis, i in zip(values, row, strict=True)]
        flat: list[Any] = []
        marks = [] if row in fast else [pytest.mark.slow]
        for value in chosen:
            if isinstance(value, _PARAM):
                flat, marks = [*flat, *value.values], [*marks, *value.marks]
            else:
                flat += value if isinstance(value, tuple) else [value]
        rows.append(pytest.param(*flat, marks=marks))
    return rows
