"""Tables of what `offload eval ruler --json` wrote."""

from __future__ import annotations

from typing import Any

from perf.results_file import read_results
from perf.tables.ruler_tables import ruler_ablation_table


def row(policy: str, score: float) -> dict[str, Any]:
    measured = {"scored_tokens": 1234.0, "decode_seconds": 2.0, "decoded_tokens": 100}
    return {"policy": policy, "score": score} | measured


def test_an_ablation_has_a_row_of_each_variant_and_columns_of_each_budget() -> None:
    result = read_results("ruler-ablation")
    assert result is not None
    names = ("full", "lfps 160", "lfps 160 alpha=0.2 spread=0", "lfps 320", "quest 320")
    made = result | {"summary": [row(name, i / 4) for i, name in enumerate(names)]}
    text = ruler_ablation_table(made)
    assert "Full attention: 0 %." in text
    header, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, *lines)]
    assert cells == [
        [
            "policy",
            "options",
            *(f"{n}: {x}" for n in (160, 320) for x in ("right", "scored", "ms")),
        ],
        ["`lfps`", "", "25 %", "1,234", "20.0", "75 %", "1,234", "20.0"],
        ["`lfps`", "alpha=0.2 spread=0", "50 %", "1,234", "20.0", "", "", ""],
        ["`quest`", "", "", "", "", "100 %", "1,234", "20.0"],
    ]
