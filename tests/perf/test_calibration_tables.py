"""The tables of calibrated page bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf.tables.calibration_tables import calibration_table, steps_table


def result() -> dict[str, Any]:
    """Two windows; with a share as the paper's, one of our own, and none."""
    of_text = {"length": 7168, "text": "prose"}
    rows: list[dict[str, Any]] = [
        of_text
        | {"part": "counts", "top_p": 0.9, "window": window, "calibrate": "tokens"}
        | {"share": share, "needed": 200.0}
        | {"selected": 200.0 + 20 * window, "median": 0.1 * window, "p90": 0.25}
        for window in (0, 1)
        for share in (0.0, 0.35, 0.9)
    ]
    kept = {"mass_kept": 0.5, "kl": 0.1, "loss_change": 0.0}
    for inner, said, attended, error in (
        ("full", {}, 7168.0, 0.0),
        ("quest", {"budget_tokens": 128}, 128.0, 0.4),
        ("quest", {"budget_tokens": 512}, 512.0, 0.1),
        ("quest, mass", {"top_p": 0.9}, 128.0, 0.2),
    ):
        measured = {"attended_tokens": attended, "output_error": error}
        rows.append(
            of_text | {"part": "steps", "window": 0, "inner": inner} | kept | measured | said
        )
    ruler = Path(__file__).parents[2] / "perf/results/ruler.json"
    settings = {"model": "tiny", "lengths": [7168], "steps": 8, "most": 2048, "window_queries": 64}
    machine = json.loads(ruler.read_text("utf-8"))["machine"]
    return {"machine": machine, "settings": settings, "rows": rows}


def test_means_of_windows_by_kind() -> None:
    lines = [x for x in calibration_table(result()).splitlines() if x.startswith("| exact top-p")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[2] for line in cells] == [
        "no: the window's mean",
        "pages that hold 35%: `tokens`",
        "pages that hold 90%: the paper's",
    ]
    for line in cells:
        assert line[1] == "90%"
        assert line[3:] == ["210", "200", "5.0%", "25.0%"]


def test_shares_are_compared_with_fixed_budgets_of_the_policy_they_are_of() -> None:
    (line,) = (x for x in steps_table(result()).splitlines() if x.startswith("| `quest, mass`"))
    # 0.2 lies halfway between 0.4 and 0.1, and so does 256 between 128 and 512.
    assert [cell.strip() for cell in line.strip("|").split("|")][2:5] == ["128", "0.200", "0.50"]
