"""top_mass against sorting: any distribution, ties, sums that are not reached, and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native


def fewest(x: np.ndarray, positions: np.ndarray, mass: float) -> np.ndarray:
    """By sorting; all where they do not sum to `mass`."""
    if mass <= 0:
        return positions[:0]
    by_weight = positions[np.lexsort((positions, -x[positions]))]
    enough = np.cumsum(x[by_weight].astype(np.float64)) >= mass
    count = int(enough.argmax()) + 1 if enough.any() else len(positions)
    return np.sort(by_weight[:count])


def taken(x: np.ndarray, positions: np.ndarray, mass: float) -> np.ndarray:
    return native.top_mass(torch.from_numpy(x), positions, mass)


@pytest.mark.parametrize(("n", "power"), combinations([1, 2, 17, 300, 5000], [0, 1, 4, 30]))
def test_random_values(n, power):
    """From all alike to sixty octaves between them."""
    rng = new_rng()
    x = (rng.random(2 * n) ** power).astype(np.float32)
    positions = np.sort(rng.choice(2 * n, n, replace=False)).astype(np.int32)
    total = float(x[positions].astype(np.float64).sum())
    for share in (0.0, 1e-6, 0.3, 0.5, 0.9, 0.999):
        # Sums in another order differ by rounding: the mass lies between two of them.
        mass = share * total + (0.5 * float(x[positions].min()) if power == 0 else 0.0)
        expected, actual = fewest(x, positions, mass), taken(x, positions, mass)
        assert abs(len(actual) - len(expected)) <= 1
        if len(actual) == len(expected):
            np.testing.assert_array_equal(actual, expected)


def test_ties_prefer_lower_positions():
    x = np.array([0.25, 0.5, 0.25, 0.5, 0.25, 0.25], np.float32)
    for mass, expected in ((0.5, [1]), (0.6, [1, 3]), (1.25, [0, 1, 3]), (1.3, [0, 1, 2, 3])):
        assert taken(x, np.arange(6, dtype=np.int32), mass).tolist() == expected
    assert taken(x, np.array([2, 4, 5], np.int32), 0.4).tolist() == [2, 4]


def test_what_is_not_reached_keeps_all():
    x, positions = np.array([0.1, np.nan, 0.2], np.float32), np.array([0, 2], np.int32)
    assert taken(x, positions, 9.0).tolist() == [0, 2]
    assert taken(x, np.arange(3, dtype=np.int32), 0.2).tolist() == [0, 1, 2]
    assert taken(x, positions[:0], 1.0).tolist() == []
    assert taken(x, positions, -1.0).tolist() == []


def test_the_positions_given_are_left_alone():
    x, positions = np.ones(4, np.float32), np.arange(4, dtype=np.int32)
    taken(x, positions, 1.5)
    assert positions.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"positions must lie in \[0, 4\)"):
        taken(x, np.array([2, 4], np.int32), 1.0)
