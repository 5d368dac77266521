"""The pilot of pages against chunks: what counts of a run that was cut short, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf.bench_structured import score_rows
from perf.eval_parts import read_records
from perf.tables.structured_tables import structured_table

LABELS = ("full", "exact_topk 128", "quest 128", "quest 128 chunks=True", "lychee_cluster 128")
MACHINE: dict[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
    "cpu": "A CPU",
    "cpus_present": 4,
    "cpus_usable": 2,
    "memory_bytes": 24 * 2**30,
    "isa": "avx2",
    "gpus": [],
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "date": "2026-01-01",
    "load_average": 0.1,
}


def record(task: str, index: int, *scores: float, length: int = 2048) -> dict[str, Any]:
    answers = {label: {"score": score} for label, score in zip(LABELS, scores, strict=True)}
    return {"task": task, "length": length, "index": index, "answers": answers}


def test_what_was_written_when_the_time_was_over_counts(tmp_path: Path) -> None:
    file = tmp_path / "json-0.jsonl"
    assert read_records(file) == ({}, [])
    lines = [{"options": {"fields": 1}}, record("json", 0, 1, 1, 0, 1, 1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"task": "js')
    assert read_records(file) == ({"fields": 1}, lines[1:])


def test_table() -> None:
    records = [record("json", i, 1, 1, i % 2, 1, 0) for i in range(4)]
    records += [record("code", i, 1, 0, 0, 0, 1) for i in range(2)]
    rows = score_rows(records)
    assert [row["scores"] for row in rows if row["policy"] == "quest 128"] == [[0, 0], [0, 1, 0, 1]]
    settings = {"model": "a model", "fields": 2}
    text = structured_table({"rows": rows, "settings": settings, "machine": MACHINE})
    assert "2 to 4 samples of each kind and length, 2 fields" in text
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert lines["2,048 tokens"].startswith(
        "| 2,048 tokens | 128 | 100.0 | 50.0 | 50.0 | 25.0 | 50.0 | +25.0 | -"
    )
    assert "±" not in text
    assert not [name for name in lines if name.startswith("all")]  # of one length

    records += [record("json", i, 1, 1, 1, 1, 1, length=4096) for i in range(4)]
    records += [record("code", i, 0, 1, 1, 1, 1, length=4096) for i in range(4)]  # does not count
    result = {"rows": score_rows(records), "settings": settings, "machine": MACHINE}
    text = structured_table(result)
    assert "| 4,096 tokens | 128 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | +0.0 | " in text
    assert "| all, json | 128 | 100.0 | 100.0 | 50.0 | 75.0 | 100.0 | +25.0 | " in text
    assert "| all, code | 128 | 100.0 | 0.0 | 100.0 | 0.0 | 0.0 | +0.0 | " in text
