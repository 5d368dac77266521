"""Markdown of perf/results/selection.json and niah.json: the tables that README and docs show."""

from __future__ import annotations

from typing import Any

from offload.bench.selection.output import COLUMNS, LEGEND, cells
from perf.tables.markdown import mark, markdown_table
from perf.tables.tables import machine_line

# What issue 3 asks for; shown beside what was measured.
LFPS_MASS_OF_TOPK = 0.98
PERPLEXITY_CHANGE = 0.01
PERPLEXITY_BUDGET = 1024
BETTER_THAN_QUEST = ("lychee_cluster", "tidal_decode", "lychee_decode")
LOW_PERPLEXITY = ("lfps", "lychee_cluster")
NIAH_SCORE = 1.0
CANDIDATE_TOLERANCE = 0.25
# LFPS, Table 4: share of the positions whose keys are scored, by alpha, at 4K and 8K tokens.
PAPER_CANDIDATES = {0.1: (0.080, 0.062), 0.2: (0.060, 0.046), 0.3: (0.048, 0.041)}
PAPER_CANDIDATES |= {0.4: (0.042, 0.036)}


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
    return "\n\n".join(
        [title, markdown_table(header, lines), legend, machine_line(result["machine"])]
    )


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
    rows = [r for r in result["rows"] if r["part"] == "candidates" and r["policy"] == "lfps"]
    lines = []
    for row in rows:
        alpha = row["options"]["alpha"]
        tokens = row["context"] + row["steps"] // 2
        paper = PAPER_CANDIDATES[alpha][tokens > 6000]
        share = row["candidate_share"]
        always = (row["options"]["sink_tokens"] + row["options"]["recent_tokens"]) / tokens
        own = share - always  # the paper keeps sinks elsewhere, and has no recent window
        met = abs(own / paper - 1) <= CANDIDATE_TOLERANCE
        lines.append(
            [
                f"{alpha}",
                f"{tokens:,}",
                f"{share:.1%}",
                f"{own:.1%}",
                f"{paper:.1%}",
                f"{own / paper:.2f} of the paper's ({1 - CANDIDATE_TOLERANCE}\N{EN DASH}"
                f"{1 + CANDIDATE_TOLERANCE} {mark(met)})",
            ]
        )
    title = (
        "Keys that LFPS scores exactly, as a share of the cache (sinks and recent window "
        "included, and without them, which is what the paper's Table 4 counts) at 4K and 8K tokens."
    )
    header = ["alpha", "tokens", "scored", "without sinks and recent", "paper", "target"]
    return "\n\n".join([title, markdown_table(header, lines), machine_line(result["machine"])])


def niah_table(result: dict[str, Any]) -> str:
    """Scores of RULER's needle task."""
    settings = result["settings"]
    lines = [
        [
            row["label"],
            "" if row["budget_tokens"] is None else f"{row['budget_tokens']:,}",
            f"{row['score']:.2f}",
            f"{NIAH_SCORE} {mark(row['score'] >= NIAH_SCORE)}",
        ]
        for row in result["rows"]
    ]
    title = (
        f"{settings['model']}, RULER's `{settings['task']}` at {settings['length']:,} tokens "
        f"through lm-eval, the same {settings['samples']} prompts for every policy."
    )
    table = markdown_table(["policy", "budget", "score", "target"], lines)
    return "\n\n".join([title, table, machine_line(result["machine"])])


def policy_speed_table(result: dict[str, Any]) -> str:
    """Decode tokens/s of a whole model under each policy, beside exact top-k."""
    rows = {row["engine"].removeprefix("offload "): row for row in result["rows"]}
    rows = {name: row for name, row in rows.items() if row["engine"].startswith("offload ")}
    exact = rows["exact_topk"]["decode_tokens_per_second"]
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["decode_tokens_per_second"]):
        speed = row["decode_tokens_per_second"]
        met = "" if name in ("exact_topk", "full") else f" {mark(speed >= exact)}"
        lines.append([f"`{name}`", f"{speed:.1f}", f"{speed / exact:.0%}{met}"])
    contexts = ", ".join(f"{c:,}" for c in sorted({row["context"] for row in rows.values()}))
    return (
        f"{result['settings']['model']} at {contexts} tokens, all engines in turns on the same "
        "text, default options; target: at least exact_topk's speed.\n\n"
        + markdown_table(["policy", "tokens/s", "of exact_topk"], lines)
        + "\n\n"
        + machine_line(result["machine"])
    )
