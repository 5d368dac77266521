"""Markdown of perf/results/selection.json and niah.json: the tables that README and docs show."""

from __future__ import annotations

from typing import Any

from offload.bench.quality.output import COLUMNS, LEGEND, cells
from perf.tables.markdown import (
    Columns,
    known,
    markdown_table,
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
    parts = [title, markdown_table(header, lines), legend, machine_line(result["machine"])]
    return "\n\n".join(parts)


def niah_table(result: dict[str, Any]) -> str:
    """Scores of RULER's needle task."""
    settings = result["settings"]
    title = (
        f"{settings['model']}, RULER's `{settings['task']}` at {settings['length']:,} tokens "
        f"through lm-eval, the same {settings['samples']} prompts for every policy."
    )
    columns: Columns = {
        "policy": "{label}",
        "budget": known("budget_tokens", ","),
        "score": "{score:.2f}",
    }
    return "\n\n".join([title, table(columns, result["rows"]), machine_line(result["machine"])])


def policy_speed_table(result: dict[str, Any]) -> str:
    """Decode tokens/s of a whole model under each policy, beside exact top-k."""
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


def quality_probe_table(result: dict[str, Any]) -> str:
    """What shares of probed selections cost, and what is noise."""
    settings = result["settings"]
    columns: Columns = {
        "policy": "`{policy}`",
        "share": "{share}",
        "ms a step": "{milliseconds:.3f}",
        "probes a step": "{probes_per_step:.2f}",
        "longer by": "{extra:+.2%}",
        "25th to 75th percentile": "{extra_p25:+.2%} to {extra_p75:+.2%}",
    }
    return (
        f"{settings['model'] or settings['shape']}, {settings['kv_len']:,} tokens: the mean of "
        f"{settings['steps']} steps against that of as many without a probe, in turns, median of "
        f"{settings['turns']}; `0 again` is what noise makes of it.\n\n"
        f"{table(columns, result['rows'])}\n\n{machine_line(result['machine'], spreads=False)}"
    )
