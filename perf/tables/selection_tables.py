"""Markdown of perf/results/selection.json and its like: tables that README and docs show."""

from __future__ import annotations

from typing import Any

from offload.bench.eval.output import markdown
from offload.bench.quality.output import COLUMNS, LEGEND, cells
from perf.tables.markdown import (
    Columns,
    policy_options_note,
    table,
)
from perf.tables.tables import machine_line


def selection_table(result: dict[str, Any]) -> str:
    """Quality of every policy at every budget."""
    settings = result["settings"]
    rows = [row for row in result["rows"] if row["part"] == "quality"]
    header = ["policy", *(name for name, _, _ in COLUMNS)]
    lines = [[row["label"], *cells(row)] for row in rows]
    title = (
        f"{settings['model']} on {settings['text']}: {settings['context']:,} tokens are read, the "
        f"next {settings['steps']:,} decoded one by one; every {settings['sample_every']}th step "
        "is compared with exact attention in every sparse layer."
    )
    legend = LEGEND[0].upper() + LEGEND[1:]
    parts = [title, markdown(header, lines), legend, machine_line(result["machine"])]
    return "\n\n".join(parts)


def policy_speed_table(result: dict[str, Any]) -> str:
    """Decode tokens/s of a whole model under each policy, compared with exact top-k."""
    rows = [
        row | {"policy": row["engine"].removeprefix("offload ")}
        for row in result["rows"]
        if row["engine"].startswith("offload ")
    ]
    rows.sort(key=lambda row: -row["decode_tokens_per_second"])
    speeds = {row["policy"]: row["decode_tokens_per_second"] for row in rows}

    contexts = ", ".join(f"{c:,}" for c in sorted({row["context"] for row in rows}))
    title = (
        f"{result['settings']['model']} at {contexts} tokens, all engines in turns on the same "
        f"text. {policy_options_note()}"
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "tokens/s": "{decode_tokens_per_second:.1f}",
        "of exact_topk": lambda row: f"{speeds[row['policy']] / speeds['exact_topk']:.0%}",
    }
    return "\n\n".join([title, table(columns, rows), machine_line(result["machine"])])
