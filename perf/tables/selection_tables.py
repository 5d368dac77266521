"""Markdown of perf/results/selection.json and niah.json: the tables that README and docs show."""

from __future__ import annotations

from typing import Any

from offload.bench.selection.output import COLUMNS, LEGEND, cells
from perf.tables.markdown import (
    Columns,
    Row,
    known,
    mark,
    markdown_table,
    policy_options_note,
    table,
)
from perf.tables.tables import machine_line

# What issue 3 asks for; shown beside what was measured.
LFPS_MASS_OF_TOPK = 0.98
PERPLEXITY_CHANGE = 0.01
PERPLEXITY_BUDGET = 1024
BETTER_THAN_QUEST = ("lychee_cluster", "tidal_decode", "lychee_decode")
LOW_PERPLEXITY = ("lfps", "lychee_cluster")
NIAH_SCORE = 1.0


def selection_table(result: dict[str, Any]) -> str:
    """Quality of every policy at every budget."""
    settings = result["settings"]
    rows = [row for row in result["rows"] if row["part"] == "quality"]
    quest = {r["budget_tokens"]: r["mass_kept"] for r in rows if r["policy"] == "quest"}
    header = ["policy", *(name for name, _, _ in COLUMNS), "target"]
    lines = [[row["label"], *cells(row), _targets(row, quest)] for row in rows]
    title = (
        f"{settings['model']} on {settings['text']}: {settings['context']:,} tokens are read, the "
        f"next {settings['steps']:,} decoded one by one; every {settings['sample_every']}th step "
        "is compared with exact attention in every sparse layer."
    )
    legend = LEGEND[0].upper() + LEGEND[1:]
    parts = [title, markdown_table(header, lines), legend, machine_line(result["machine"])]
    return "\n\n".join(parts)


def _targets(row: dict[str, Any], quest: dict[int, float]) -> str:
    wanted = []
    name, budget = row["policy"], row["budget_tokens"]
    if name == "lfps" and budget < PERPLEXITY_BUDGET:
        met = row["mass_of_topk"] >= LFPS_MASS_OF_TOPK
        wanted.append(f"≥ {LFPS_MASS_OF_TOPK} of top-k {mark(met)}")
    if name in BETTER_THAN_QUEST and budget in quest:
        wanted.append(f"mass above Quest's {mark(row['mass_kept'] > quest[budget])}")
    if name in LOW_PERPLEXITY and budget == PERPLEXITY_BUDGET:
        met = row["perplexity_change"] <= PERPLEXITY_CHANGE
        wanted.append(f"perplexity ≤ +{PERPLEXITY_CHANGE:.0%} {mark(met)}")
    return ", ".join(wanted)


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
        "target": lambda row: f"{NIAH_SCORE} {mark(row['score'] >= NIAH_SCORE)}",
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
    exact = speeds["exact_topk"]

    def of_exact(row: Row) -> str:
        speed = speeds[row["policy"]]
        met = "" if row["policy"] in ("exact_topk", "full") else f" {mark(speed >= exact)}"
        return f"{speed / exact:.0%}{met}"

    contexts = ", ".join(f"{c:,}" for c in sorted({row["context"] for row in rows}))
    title = (
        f"{result['settings']['model']} at {contexts} tokens, all engines in turns on the same "
        f"text; target: at least exact_topk's speed. {policy_options_note()}"
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "tokens/s": "{decode_tokens_per_second:.1f}",
        "of exact_topk": of_exact,
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
