"""The table of what cache correction brings back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from perf.tables.correction_tables import correction_table


def row(every: int | None, window: int, kl: float) -> dict[str, Any]:
    loss = {"loss": 2.0, "loss_change": math.log(1.05)}
    of_quarters = [kl / 2, kl, kl, 3 * kl / 2]
    named = {"window": window, "policy": "quest", "every": every}
    return named | {"kl": kl, "kl_of_quarters": of_quarters} | loss


def test_means_over_windows_and_their_share() -> None:
    ruler = Path(__file__).parents[2] / "perf/results/ruler.json"
    settings = {"length": 2048, "steps": 1500, "text": "prose", "model": "m", "budget_tokens": 354}
    kls = {None: (0.2, 0.6), 256: (0.1, 0.1)}
    rows = [row(every, window, of[window]) for window in (0, 1) for every, of in kls.items()]
    machine = json.loads(ruler.read_text("utf-8"))["machine"]
    text = correction_table({"settings": settings, "rows": rows, "machine": machine})
    assert "with a budget of 354; 2 windows" in text
    cells = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()]
    lines = [line for line in cells if line and line[0] == "quest"]
    quarters = "0.2000 0.4000 0.4000 0.6000"
    assert lines[0] == ["quest", "never", "0.4000", "-", quarters, "+5.00%"]
    assert lines[1][:4] == ["quest", "256 tokens", "0.1000", "25%"]
