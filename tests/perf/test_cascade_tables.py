"""The table of what a bound on a sequence costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf.tables.cascade_tables import cascade_table, long_generation_table


def row(kind: str, window: int, kl: float) -> dict[str, Any]:
    return {
        "window": window,
        "share": 0.25,
        "kind": kind,
        "condensed_share": 0.0 if kind in ("dropped", "reread") else 0.03125,
        "slots": 1024,
        "kept": 900,
        "condensed": 32,
        "kl": kl,
        "kl_of_quarters": [kl / 2, kl, kl, 3 * kl / 2],
        "loss_change": 0.02,
        "condense_seconds": 1.0,
        "condensed_tokens": 256,
        "decode_seconds": 50.0,
    }


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"length": 4096, "steps": 512, "text": "prose", "model": "m", "windows": [0, 1]}
    ruler = Path(__file__).parents[2] / "perf/results/ruler.json"
    machine = json.loads(ruler.read_text("utf-8"))["machine"]
    return {"settings": settings, "rows": rows, "machine": machine}


def test_means_over_windows() -> None:
    kinds = ("fitted", "dropped")
    rows = [row(kind, window, 0.1 * (window + 1)) for window in (0, 1) for kind in kinds]
    text = cascade_table(result(rows))
    assert "**4,096 tokens** of prose of m read, 512 decoded; 2 windows" in text
    fitted = "| 25% | fitted, 3.1% of the slots | 1,024 | 32 | 0.1500 | "
    assert f"{fitted}0.0750 0.1500 0.1500 0.2250 | +2.02% | 3.9% |" in text
    assert "| 25% | dropped | 1,024 |" in text


def test_how_long_reading_takes() -> None:
    """Older results do not say it."""
    rows = [row("reread", window, 0.1) for window in (0, 1)]
    assert "reading" not in cascade_table(result(rows))
    seconds = {"full_prompt_seconds": 4.0, "prompt_seconds": 7.0}
    text = cascade_table(result([rows[0] | seconds, rows[1] | {**seconds, "prompt_seconds": 8.0}]))
    assert "| 25% | reread | 1,024 |" in text
    assert " | 3.9% | 1.88 x |" in text


def test_errors_of_quarters() -> None:
    rows = [
        row(kind, 0, 0.1) | {"error_of_quarters": [0.1, 0.2, 0.2, error]}
        for kind, error in (("dropped", 0.3), ("rkv-fitted", 0.2))
    ]
    text = long_generation_table(result(rows))
    assert "512 decoded; 1 window:" in text
    dropped = "| 25% | dropped | 1,024 | 0.1000 0.2000 0.2000 0.3000 | 1.50 | 0.1000 | "
    assert f"{dropped}0.0500 0.1000 0.1000 0.1500 | 1.50 | +2.02% |" in text
    assert "| 25% | rkv-fitted, 3.1% of the slots | 1,024 | " in text
    assert "0.2000 | 1.00 |" in text


def test_a_second_quarter_without_any_loss_has_no_growth() -> None:
    lossless = {"kl_of_quarters": [0.0, 0.0, 0.1, 0.2], "error_of_quarters": [0.0, 0.0, 0.1, 0.2]}
    text = long_generation_table(result([row("rkv", 0, 0.1) | lossless]))
    assert text.count("0.0000 0.0000 0.1000 0.2000 | - |") == 2
