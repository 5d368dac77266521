"""Markdown of perf/results/selection.json and its like: tables that README and docs show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.bench.selection.output import COLUMNS, LEGEND, cells
from perf.tables.markdown import (
    Columns,
    Row,
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
CANDIDATE_TOLERANCE = 0.25
# LFPS, Table 4: share of the positions whose keys are scored, by alpha, at these lengths.
PAPER_LENGTHS = (4096, 8192, 16384, 32768)
PAPER_CANDIDATES = {
    0.1: (0.080, 0.062, 0.050, 0.043),
    0.2: (0.060, 0.046, 0.041, 0.034),
    0.3: (0.048, 0.041, 0.037, 0.030),
    0.4: (0.042, 0.036, 0.032, 0.025),
}


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


def lfps_candidates_table(result: dict[str, Any]) -> str:
    """Share of the keys that LFPS scores, beside the paper's."""
    least, most = 1 - CANDIDATE_TOLERANCE, 1 + CANDIDATE_TOLERANCE
    rows = []
    for row in result["rows"]:
        column = min(range(4), key=lambda i: abs(PAPER_LENGTHS[i] - row["length"]))
        paper = PAPER_CANDIDATES[row["alpha"]][column]
        # The paper keeps the sinks elsewhere.
        own = row["candidate_share"] - row["sink_tokens"] / row["length"]
        ratio, met = own / paper, mark(abs(own / paper - 1) <= CANDIDATE_TOLERANCE)
        verdict = f"{ratio:.2f} of the paper's ({least}\N{EN DASH}{most} {met})"
        rows.append(row | {"paper": paper, "own": own, "verdict": verdict})
    settings = result["settings"]
    title = (
        "Keys that LFPS scores exactly, as a share of the cache without the sinks. As in the "
        "paper's Table 4, near tokens are among them where its tables name them. "
        f"{settings['model']} on {settings['text']}, {settings['steps']} steps, a budget of 2 % of "
        "the context, the newest token as recent window."
    )
    columns = {
        "alpha": "{alpha}",
        "tokens": "{length:,}",
        "scored": "{own:.1%}",
        "paper": "{paper:.1%}",
        "target": "{verdict}",
    }
    return "\n\n".join([title, table(columns, rows), machine_line(result["machine"])])


def lfps_ablation_table(result: dict[str, Any]) -> str:
    """RULER's scores of LFPS by its options, both lengths together, and the keys it scores."""
    policies = result["settings"]["policies"]
    rows = [row for row in result["rows"] if row["part"] == "quality"]
    cells_of: dict[str, list[Row]] = {}
    for row in result["rows"]:
        if row["part"] == "cells":
            cells_of.setdefault(row["task"], []).append(row)
    count = {task: sum(cell["samples"] for cell in found) for task, found in cells_of.items()}
    lengths = sorted({row["length"] for row in rows})

    def score(label: str, tasks: Sequence[str]) -> str:
        right = sum(c["samples"] * c["scores"][label] for task in tasks for c in cells_of[task])
        return f"{100 * right / sum(count[task] for task in tasks):.0f}"

    def scored(label: str, length: int) -> str:
        of_label = (r for r in rows if (r["label"], r["length"]) == (label, length))
        return f"{next(of_label)['scored_tokens']:,.0f}"

    def line(label: str, options: dict[str, Any]) -> list[str]:
        shown = [f"{options.get(name, '')}" for name in ("spread", "alpha", "bypass_threshold")]
        of_tasks = [score(label, [task]) for task in count]
        at_lengths = [scored(label, length) for length in lengths]
        return [label.split(" ")[0], *shown, score(label, [*count]), *of_tasks, *at_lengths]

    header = ["policy", "spread", "alpha", "bypass", "all", *count]
    header += [f"scored, {length:,}" for length in lengths]
    title = (
        f"{result['settings']['model']}, RULER, per cent right: "
        f"{', '.join(f'{n} prompts of {task}' for task, n in count.items())}, at "
        f"{' and '.join(f'{length:,}' for length in lengths)} tokens, seed {rows[0]['seed']}, "
        f"budget {max(options.get('budget_tokens', 0) for options in policies.values())}. Scored: "
        "keys of a step, layer and KV head; layers that do not select count as none."
    )
    lines = [line(label, options) for label, options in policies.items()]
    machine = machine_line(result["machine"], spreads=False)
    return "\n\n".join([title, markdown_table(header, lines), machine])


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
