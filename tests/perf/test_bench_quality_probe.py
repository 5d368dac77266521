"""The cost of `quality_probe`: turns and ratios, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perf.bench_quality_probe import CONTROL, measure
from perf.results_file import start_machine
from perf.tables.selection_tables import quality_probe_table


class Session:
    """Steps take 10 ms, with a probe 1 + share times as long; each turn is slower than the last."""

    def __init__(self) -> None:
        self.share, self.found, self.turn = 0.0, 0, 0
        self.order: list[float] = []
        self._decoder = SimpleNamespace(attention=self)

    def start_probe(self, share: float, *, seed: int) -> None:
        self.share = share

    def num_probed(self) -> int:
        return self.found

    def rewind(self) -> None:
        self.turn += 1

    def decode(self, num_steps: int) -> list[float]:
        self.order.append(self.share)
        self.found += round(100 * self.share) * num_steps
        return [0.01 * self.turn * (1 + self.share)] * num_steps


def test_blocks_take_turns_and_are_compared_within_them() -> None:
    session: Any = Session()
    blocks = {"0": 0.0, CONTROL: 0.0, "0.25": 0.25}
    rows = {row["share"]: row for row in measure(session, blocks, 8, 3)}
    warm_up = session.order[::4]
    assert warm_up == [0.0, 0.0, 0.0]
    assert [session.order[i] for i in (3, 6, 9)] == [0.25, 0.25, 0.25]
    assert rows["0.25"]["extra"] == pytest.approx(0.25)
    assert rows["0.25"]["probes_per_step"] == 25
    assert rows["0.25"]["milliseconds"] == pytest.approx(25.0)
    assert rows[CONTROL]["extra"] == rows["0"]["probes_per_step"] == 0


def test_table() -> None:
    rows = measure(Session(), {"0": 0.0, "0.25": 0.25}, 8, 3)  # type: ignore[arg-type]
    settings = {"model": None, "shape": "tiny", "kv_len": 4096, "steps": 8, "turns": 3}
    result = {
        "settings": settings,
        "rows": [row | {"policy": "lfps"} for row in rows],
        "machine": start_machine("abc"),
    }
    assert "| `lfps` | 0.25 | 25.000 | 25.00 | +25.00% | +25.00% to +25.00% |" in (
        quality_probe_table(result)
    )
