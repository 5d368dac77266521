"""RULER within a bound: rows of records, and their table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf.bench_bounded import answer_rows
from perf.tables.bounded_tables import bounded_table


def record(task: str, index: int, whole: float, within: float) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "full": {"score": whole, "attended_tokens": 1000.0},
        "full host=0.5 dropped": {
            "score": within,
            "attended_tokens": 480.0,
            "slots": 500,
            "condensed_tokens": 520,
        },
    }
    return {"task": task, "length": 1024, "index": index, "answers": answers}


def table(records: list[dict[str, Any]]) -> str:
    settings = {
        "model": "a model",
        "policies": {"full": {}},
        "bounds": [{"share": 0.5, "eviction": "dropped"}],
        "length": 1024,
        "page_tokens": 64,
    }
    results = Path(__file__).parents[2] / "perf" / "results" / "paper-cascade.json"
    machine = json.loads(results.read_text())["machine"]
    return bounded_table({"rows": answer_rows(records), "settings": settings, "machine": machine})


def test_a_bound_beside_all_bytes() -> None:
    records = [record("vt", i, 1, i % 2) for i in range(4)]
    records += [record("cwe", i, 0.5, 0.25) for i in range(2)]
    records += [record("fwe", i, 0, 1) for i in range(2)]  # does not count
    text = table(records)
    assert "mean over cwe, vt; 2 to 4 prompts of each task, 1,024 tokens; pages of 64." in text
    assert "| full | all | \N{EN DASH} | 75.0 | \N{EN DASH} | \N{EN DASH} | " in text
    assert "| full | 50% | dropped | 37.5 | -37.5 | -" in text
    assert " | 500 | 520 | 480 |" in text


def test_how_long_reading_takes() -> None:
    records = [record("vt", i, 1, i % 2) | {"prefill_seconds": 2.0} for i in range(4)]
    assert "reading" not in table([record("vt", i, 1, i % 2) for i in range(4)])
    for each in records:
        each["answers"]["full host=0.5 dropped"]["prefill_seconds"] = 4.5
    assert " | 500 | 520 | 480 | 2.25 x |" in table(records)


def test_labels_of_older_results() -> None:
    """Which leave out that tokens were fitted, and say nothing of times."""
    results = Path(__file__).parents[2] / "perf" / "results" / "bounded-ruler.json"
    found = json.loads(results.read_text())
    rows = [
        {name: value for name, value in row.items() if name != "prefill_seconds"}
        | {"policy": "full host=0.5" if "host=0.5" in row["policy"] else "full"}
        for row in found["rows"]
        if row["policy"] in ("full", "full host=0.5", "full host=0.5 fitted")
    ]
    settings = found["settings"] | {"bounds": [{"share": 0.5, "eviction": "fitted"}]}
    text = bounded_table(found | {"rows": rows, "settings": settings})
    assert "| full | 50% | fitted | " in text
    assert "reading" not in text


def test_nothing_answered() -> None:
    assert table([record("vt", 0, 0, 0)]).startswith("*Full attention answered nothing")
