"""top_k and top_mass against references: ties, orders that mislead the sampling, and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native

ISAS = native.available_isas()
DIRECT = 16384  # longer inputs are cut down by a sampled threshold first


def check(x: np.ndarray, k: int, isa: str) -> None:
    values = np.ascontiguousarray(x, np.float32)
    actual = native.top_k(torch.from_numpy(values), k, isa=isa)
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, reference.top_k(values.astype(np.float64), k))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 16, 17, 63, 64, 65, 1000, DIRECT, DIRECT + 1, 40001])
def test_random_values(isa, n):
    rng = new_rng()
    for values in (rng.standard_normal(n), -rng.exponential(size=n), rng.exponential(size=n)):
        for k in {0, 1, 2, n // 50, n // 2, n - 1, n, n + 5}:
            check(values, k, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [5, 100, DIRECT + 999])
def test_ties_prefer_lower_positions(isa, n):
    rng = new_rng()
    for k in (1, n // 3, n - 1, n):
        check(np.full(n, 0.25), k, isa)
        check(np.zeros(n), k, isa)
        check(rng.integers(0, 3, n), k, isa)
        check(np.where(rng.integers(0, 2, n) > 0, 0.0, -0.0), k, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [1, 500, 20000, 59999])
def test_orders_that_mislead_a_sample(isa, k):
    """Sorted, peaks between the sampled positions, all of the top in one place."""
    n = 60000
    rng = new_rng()
    ascending = np.arange(n)
    peaks = np.zeros(n)
    peaks[3::29] = 1 + rng.random(len(peaks[3::29]))
    cluster = rng.random(n)
    cluster[-700:] += 10
    flat_with_one_low = np.ones(n)
    flat_with_one_low[n // 2] = -1
    on_samples = np.zeros(n)
    on_samples[(np.arange(2048) * (n / 2048)).astype(np.int64)] = 1 + rng.random(2048)
    cases = (ascending, -ascending, peaks, cluster, flat_with_one_low, on_samples)
    for values in cases:
        check(values, k, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [40, DIRECT + 3])
def test_infinities_and_extremes(isa, n):
    values = np.resize([np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, 1.0], n)
    for k in (1, n // 8 + 1, n // 2, n - 1, n):
        check(values, k, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [10, DIRECT + 100])
def test_nan(isa, n):
    """A NaN is never chosen; where too few numbers are left, that is an error."""
    values = torch.arange(n, dtype=torch.float32)
    values[n // 2] = float("nan")
    for k in (1, n // 4):
        assert list(native.top_k(values, k, isa=isa)) == list(range(n - k, n))
    with pytest.raises(RuntimeError, match="top_k: NaN among the values"):
        native.top_k(values, n, isa=isa)
    with pytest.raises(RuntimeError, match="top_k: NaN among the values"):
        native.top_k(torch.full((n,), float("nan")), 1, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_to_choose(isa):
    assert len(native.top_k(torch.zeros(0), 3, isa=isa)) == 0
    assert len(native.top_k(torch.zeros(4), 0, isa=isa)) == 0
    assert len(native.top_k(torch.zeros(4), -1, isa=isa)) == 0


def test_bad_input_is_refused():
    for x in (torch.zeros(4).half(), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"x must be torch.float32 \[\d+\] on the CPU"):
            native.top_k(x, 1)


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
def test_top_mass_of_random_values(n, power):
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


def test_top_mass_of_ties():
    x = np.array([0.25, 0.5, 0.25, 0.5, 0.25, 0.25], np.float32)
    for mass, expected in ((0.5, [1]), (0.6, [1, 3]), (1.25, [0, 1, 3]), (1.3, [0, 1, 2, 3])):
        assert taken(x, np.arange(6, dtype=np.int32), mass).tolist() == expected
    assert taken(x, np.array([2, 4, 5], np.int32), 0.4).tolist() == [2, 4]


def test_a_mass_that_is_not_reached_keeps_all():
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
