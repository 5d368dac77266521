"""The time that cache correction adds, of steps whose times are known, and of a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf.papers import correction_time
from perf.tables.correction_tables import time_table

EVERY, STEPS = 4, 11


class Session:
    """Steps take 10 ms, correcting ones 50, 38 of them in the correction, and the next ones 12."""

    def __init__(self, dense_tokens: int = 8, length: int = 20) -> None:
        self.ways: list[bool] = []
        self.length = length
        self.stats = SimpleNamespace(correction_seconds=3.0, corrected_tokens=7)
        self.sequences = SimpleNamespace(corrections=None)
        self.config = SimpleNamespace(policy=SimpleNamespace(dense_tokens=dense_tokens))
        self.store, self._runtime = None, self

    def rewind(self) -> None:
        self.sequences.corrections = "of another pass"

    def decode(self, num_steps: int) -> list[float]:
        seconds, corrections = [0.01] * num_steps, self.sequences.corrections
        self.ways.append(corrections is not None)
        if corrections is None:
            return seconds
        waiting, follows = 0, False
        for step in range(num_steps):
            if follows:
                seconds[step] = 0.012
            follows = waiting == corrections.every
            if follows:
                seconds[step], waiting = 0.05, 0
                self.stats.correction_seconds += 0.038
                self.stats.corrected_tokens += corrections.every
            elif self.length + step >= self.config.policy.dense_tokens:
                waiting += 1
        return seconds


def test_both_ways_in_turns() -> None:
    session: Any = Session()
    row = correction_time.measure(session, EVERY, STEPS, repeats=3)
    assert session.ways == [True, False, True, True, False, False, True]
    assert row["ms_per_token"] == pytest.approx(10)
    assert row["ms_per_token_corrected"] == pytest.approx((7 * 10 + 2 * 50 + 2 * 12) / STEPS)
    assert row["added_share"] == pytest.approx((2 * 40 + 2 * 2) / (STEPS * 10))
    assert row["correction_seconds"] == pytest.approx(2 * 0.038)
    assert row["seconds_per_correction"] == pytest.approx(0.038)
    times = [row[name] for name in ("step_ms", "correcting_step_ms", "next_step_ms")]
    assert times == pytest.approx([10, 50, 12])
    assert [len(x) for x in row["ms_of_repeats"]] == [3, 3]


def test_steps_that_attend_to_everything() -> None:
    session: Any = Session(dense_tokens=23)
    with pytest.raises(ValueError, match="4 of 8 tokens were corrected: the others attended"):
        correction_time.measure(session, EVERY, STEPS, repeats=1)


@pytest.mark.parametrize("backend", [[], ["--backend", "inline"]])
def test_random_weights(
    backend: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "--shape tiny --length 90 --every 4 --budget 0.8 --repeats 1 --threads 1 --policies"
    options = [*given.split(), "lychee_cluster", *backend, "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["correction_time", *options, "--commit", "abc"])
    correction_time.main()
    written = json.loads((tmp_path / "paper-correction-time.json").read_text())
    assert (written["machine"]["commit"], written["settings"]["steps"]) == ("abc", STEPS)
    assert [row["policy"] for row in written["rows"]] == ["lychee_cluster"]
    assert written["rows"][0]["correction_seconds"] > 0
    cells = [line.split("|") for line in time_table(written).splitlines()]
    (line,) = (line for line in cells if line[1:2] == [" lychee_cluster "])
    assert float(line[3]) == pytest.approx(written["rows"][0]["ms_per_token_corrected"], abs=0.01)
