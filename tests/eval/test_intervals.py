"""How often intervals cover the truth, of few samples with scores like RULER's."""

from __future__ import annotations

import numpy as np
import pytest
from cases.slowly import slow_but

from offload.bench.eval.intervals import Values, score_interval, student_interval

# Answers of a sample; shares that full attention finds, that a policy loses of them, that it gains.
LOSES_LITTLE = (1, 0.95, 0.02, 0.0)
LOSES_A_TENTH = (1, 0.95, 0.1, 0.02)
LOSES_A_QUARTER = (1, 0.9, 0.25, 0.05)
LOSES_HALF = (1, 0.9, 0.5, 0.05)
LOSES_MOST = (1, 0.95, 0.8, 0.0)
OF_FOUR = (4, 0.9, 0.4, 0.1)
OF_TEN = (10, 0.3, 0.3, 0.1)
TASKS = (LOSES_LITTLE, LOSES_A_TENTH, LOSES_A_QUARTER, LOSES_HALF, OF_FOUR, OF_TEN)
Task = tuple[int, float, float, float]


def differences(task: Task, num_samples: int, rng: np.random.Generator) -> Values:
    answers, finds, loses, gains = task
    full = rng.random((num_samples, answers)) < finds
    drawn = rng.random((num_samples, answers))
    return np.where(full, drawn >= loses, drawn < gains).mean(1) - full.mean(1)


@pytest.mark.parametrize("num_samples", slow_but([4, 8, 20], 8))
@pytest.mark.parametrize(
    "tasks",
    [
        (LOSES_LITTLE,),
        (LOSES_A_TENTH,),
        (LOSES_HALF,),
        (LOSES_MOST,),
        (OF_FOUR,),
        (LOSES_LITTLE,) * 8,
        (LOSES_HALF,) * 8,
        TASKS,
    ],
)
def test_the_interval_covers_the_truth(tasks: tuple[Task, ...], num_samples: int) -> None:
    rng, draws = np.random.default_rng(2), 700
    truth = np.mean([(1 - finds) * gains - finds * loses for _, finds, loses, gains in tasks])
    hits = 0
    for _ in range(draws):
        interval = score_interval([differences(task, num_samples, rng) for task in tasks])
        assert interval is not None
        hits += interval[0] <= truth <= interval[1]
    assert hits / draws >= 0.93


def test_more_samples_tell_more() -> None:
    rng = np.random.default_rng(0)
    widths = [
        np.ptp(score_interval([differences(LOSES_HALF, n, rng) for _ in range(5)]))
        for n in (4, 20, 100)
    ]
    assert widths[0] > 1.8 * widths[1] > 3.2 * widths[2]
    assert widths[2] < 0.11  # and what was not seen no longer weighs


def test_groups_of_one_sample_have_no_interval() -> None:
    lost, kept = np.full(50, -1.0), np.zeros(50)
    assert score_interval([]) is None
    assert score_interval([lost, kept[:1]]) is None  # one sample says nothing of its spread
    assert score_interval([lost[:2]]) == (-1.0, pytest.approx(0.348, abs=1e-3))


@pytest.mark.parametrize("num_windows", [2, 4, 8, 20])
def test_students_interval(num_windows: int) -> None:
    rng, draws = np.random.default_rng(3), 2000
    hits = 0
    for _ in range(draws):
        low, high = student_interval(rng.normal(0.3, 0.1, num_windows))
        hits += low <= 0.3 <= high
    assert 0.935 < hits / draws < 0.965
    assert student_interval(np.array([0.5])) is None
