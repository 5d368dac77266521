"""`perf.bench_plan` at a tiny shape on the CPU, and what it calls wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.decode.gpu.placement import HeadPlacement
from perf.bench_plan import SETTINGS, judge, main


def test_twelve_settings() -> None:
    assert len(set(SETTINGS)) == 12
    assert {setting.kv_len for setting in SETTINGS} == {32768, 131072}
    assert {setting.budget_tokens for setting in SETTINGS} == {1024, 2048, 4096}
    assert {setting.threads for setting in SETTINGS} == {8, 15}


def row(error: float, planned: int, actual: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "policy": "quest",
        "kv_len": 1,
        "budget_tokens": 1,
        "threads": 1,
        "placement": "chosen",
        "heads": {},
        "predicted_milliseconds": 1.0 + error,
        "milliseconds": 1.0,
        "error": error,
    }
    for name in ("kv_device", "device", "host", "policy"):
        document |= {f"planned_{name}_bytes": None, f"{name}_bytes": None}
    return document | {"planned_host_bytes": planned, "host_bytes": actual}


@pytest.mark.parametrize(
    ("of_row", "code", "said"),
    [
        (row(0.14, 100, 100), 0, "1 of 1 predictions within 15%"),
        (row(-0.16, 100, 100), 1, "0 of 1 predictions within 15%"),
        (row(0.0, 103, 100), 1, "host bytes off by +3.0%"),
        (row(0.0, 101, 100), 0, "0 counts of bytes are off"),
    ],
)
def test_judgements(of_row: dict[str, Any], code: int, said: str) -> None:
    lines: list[str] = []
    assert judge([of_row], 0.15, 0.02, lines.append) == code
    assert any(said in line for line in lines)


def test_other_placements_are_reported_and_do_not_fail() -> None:
    lines: list[str] = []
    rows = [row(0.1, 100, 100), row(-0.3, 100, 100) | {"placement": "dense layers only"}]
    assert judge(rows, 0.15, 0.02, lines.append) == 0
    assert any("chosen: 1 of 1 predictions within 15%" in line for line in lines)
    assert any("dense layers only: 0 of 1 predictions within 15%" in line for line in lines)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.measuring.machine.host._KV_LEN", 4096)
    monkeypatch.setattr("offload.measuring.machine.host._MAX_CACHE_BYTES", 16 * 2**20)
    arguments = ["--shape", "tiny", "--backend", "inline", "--longest", "6000", "--steps", "8"]
    arguments += ["--repeats", "1", "--output", str(tmp_path), "--commit", "a" * 40]
    assert main([*arguments, "--tolerance", "1000", "--bytes-tolerance", "10"]) == 0
    result = json.loads((tmp_path / "gpu-plan.json").read_text())
    assert len(result["rows"]) >= 6
    for of_setting in result["rows"]:
        assert of_setting["milliseconds"] > 0 < of_setting["predicted_milliseconds"]
        assert HeadPlacement.from_json(of_setting["map"]).num_layers == 4
