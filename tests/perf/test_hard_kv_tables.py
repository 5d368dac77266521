"""The table of HARD-KV's shares beside fixed budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf.tables.hard_kv_tables import hard_kv_table


def result() -> dict[str, Any]:
    """Errors fall as tokens grow; a share keeps as much with fewer."""

    def row(inner: str, attended: float, error: float, **said: Any) -> dict[str, Any]:
        of_text = {"length": 7168, "text": "prose", "window": 0, "inner": inner}
        kept = {"mass_kept": 1 - error, "kl": error / 10, "loss_change": 0.0}
        return of_text | said | kept | {"attended_tokens": attended, "output_error": error}

    rows = [
        row("full", 7168, 0.0),
        row("sketch", 128, 0.4, budget_tokens=128),
        row("sketch", 512, 0.1, budget_tokens=512),
        row("sketch", 128, 0.2, top_p=0.9),
        row("sketch", 600, 0.05, top_p=0.98),
    ]
    rows += [x | {"window": 1, "attended_tokens": x["attended_tokens"] * 3} for x in rows]
    ruler = Path(__file__).parents[2] / "perf/results/ruler.json"
    return {
        "machine": json.loads(ruler.read_text("utf-8"))["machine"],
        "settings": {"model": "tiny", "lengths": [7168], "steps": 8, "most": 2048},
        "rows": rows,
    }


def test_tokens_of_a_fixed_budget_for_the_same_error() -> None:
    text = hard_kv_table(result())
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    cells = {line[1]: line[2:] for line in lines}
    assert list(cells) == ["128", "512", "90%", "98%"]
    # 0.2 lies halfway between 0.4 and 0.1, and so does 256 between 128 and 512; windows are means.
    assert cells["90%"][:4] == ["256", "0.200", "0.50", "0.0200"]
    assert cells["98%"][2].strip() == ""  # less error than any fixed budget has
    assert cells["512"][2].strip() == ""
    assert "**7,168 tokens** of prose of tiny, 2 windows" in text
    assert "full" not in cells


@pytest.mark.parametrize("missing", ["budget_tokens", "top_p"])
def test_only_one_kind_was_measured(missing: str) -> None:
    only = result()
    only["rows"] = [row for row in only["rows"] if missing not in row]
    assert hard_kv_table(only).count("| `sketch` |") == 2
