"""Calibrated page bounds: perf/results/paper-calibration.json."""

from __future__ import annotations

from typing import Any

from perf.tables.hard_kv_tables import hard_kv_table
from perf.tables.markdown import Columns, Row, table
from perf.tables.tables import machine_line

_NEEDED = {"tokens": "exact top-p", "mass": "pages in Quest's order"}


def calibration_table(result: dict[str, Any]) -> str:
    """How well a window says how many tokens later queries need; means over texts."""
    settings = result["settings"]
    columns: Columns = {
        "needed by": "{needed_by}",
        "p": "{top_p:.0%}",
        "calibrated": "{kind}",
        "selected": "{selected:,.0f}",
        "needed": "{needed:,.0f}",
        "off, median head": "{median:.1%}",
        "off, 90th percentile": "{p90:.1%}",
    }
    parts = []
    for length in settings["lengths"]:
        rows = [x for x in result["rows"] if x["part"] == "counts" and x["length"] == length]
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            kind = _kind(row)
            found.setdefault((_NEEDED[row["calibrate"]], row["top_p"], kind), []).append(row)
        lines = [
            {"needed_by": key[0], "top_p": key[1], "kind": key[2]}
            | {
                name: sum(row[name] for row in of_key) / len(of_key)
                for name in ("selected", "needed", "median", "p90")
            }
            for key, of_key in found.items()
        ]
        texts = {(row["text"], row["window"]) for row in rows}
        parts.append(
            f"**{length:,} tokens** of {settings['model']}, {len(texts)} windows of text: a window "
            f"of {settings['window_queries']} queries, and as many after it; tokens of a KV head, "
            f"sinks and recent window included:\n\n{table(columns, lines)}"
        )
    return "\n\n".join([*parts, machine_line(result["machine"], spreads=False)])


def steps_table(result: dict[str, Any]) -> str:
    """Decode steps, as of `hard_kv` over other policies."""
    rows = [row for row in result["rows"] if row["part"] == "steps"]
    return hard_kv_table(result | {"rows": rows})


def _kind(row: Row) -> str:
    if not row["share"]:
        return "no: the window's mean"
    is_p = row["share"] == row["top_p"]
    if is_p and row["calibrate"] == "tokens":
        of = ": the paper's"
    else:  # as `share_of` has it, or not
        of = f": `{row['calibrate']}`" if is_p == (row["calibrate"] == "mass") else ""
    return f"pages that hold {row['share']:.0%}{of}"
