"""`perf.bench_plan_text`: plans beside what was measured, and both commands as it calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.bench.decode.engines import OURS, STOCK_COMPILED
from perf import bench_plan_text
from perf.tables.placement_tables import text_plan_table


def plan(policy: str, context: int, milliseconds: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "context": context,
        "milliseconds_per_step": milliseconds,
        "microseconds": {},
        "placement": {},
        "assumed": [],
        "num_threads": 2,
    }


def measured(engine: str, policy: str | None, context: int, milliseconds: float) -> dict[str, Any]:
    times = {f"milliseconds{which}": milliseconds for which in ("", "_p10", "_p90")}
    return {"engine": engine, "policy": policy, "kv_len": context, "steps": 9} | times


@pytest.mark.parametrize(("predicted", "code"), [(9.0, 0), (8.0, 1)])
def test_commands_as_they_are_called(
    predicted: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def called(*arguments: Any) -> Any:
        calls.append(list(map(str, arguments)))
        if arguments[0] == "plan":
            options = dict(zip(arguments[2::2], arguments[3::2], strict=False))
            return plan(options["--policy"], options["--context"], predicted)
        rows = [measured(OURS, "lfps", n, 10.0) for n in (300, 400)]
        rows.append(measured(STOCK_COMPILED, None, 400, 20.0))
        return {"settings": {"dtype": "float32"}, "rows": rows}

    monkeypatch.setattr(bench_plan_text, "called", called)
    arguments = ["--device", "cpu", "--contexts", "300", "400", "--policies", "lfps"]
    assert bench_plan_text.main([*arguments, "--output", str(tmp_path)]) == code
    assert ["--remeasure" in call for call in calls] == [True, False, False]
    assert calls[-1][calls[-1].index("--context") + 1] == "300,400"
    document = json.loads((tmp_path / "plan-text.json").read_text("utf-8"))
    ours, _, peer = document["rows"]
    assert ours["error"] == pytest.approx(predicted / 10 - 1)
    assert "error" not in peer
    lines = text_plan_table(document).splitlines()
    header = next(line for line in lines if line.startswith("| engine"))
    assert header.index("300 tokens: off by") < header.index("400 tokens: predicted")
    assert any("compiled |  |  |  |  | 20.00" in line for line in lines)


def test_a_command_of_ours() -> None:
    found = bench_plan_text.called("env")
    assert found["versions"]["offload"]
