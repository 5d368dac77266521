"""Markdown of perf/results/selection.json and its like: tables that README and docs show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.bench.eval.output import UNKNOWN
from perf.tables.markdown import Columns, Row, policy_options_note, table
from perf.tables.tables import machine_line

_LEGEND = (
    "Attended: tokens per unit, on average. candidates: keys scored exactly. overlap: with the "
    "equally many most important tokens. mass: attention mass kept, sinks excluded; of top-k: "
    "relative to exact top-k at the same budget. error: relative L2 error of the attention "
    "output. KL (nats) and perplexity: of the next token, against full attention. Jaccard, "
    "hit 32: selected tokens against the last step's, and against the last 32 steps'."
)


def _cell(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: UNKNOWN if row[name] is None else format(row[name], form)


_COLUMNS: Columns = {
    "policy": "{label}",
    "budget": _cell("budget_tokens", ","),
    "attended": _cell("attended_tokens", ",.0f"),
    "candidates": _cell("candidate_share", ".1%"),
    "overlap": _cell("overlap", ".3f"),
    "mass": _cell("mass_kept", ".4f"),
    "of top-k": _cell("mass_of_topk", ".4f"),
    "error": _cell("output_error", ".4f"),
    "KL": "{kl:.4f}",
    "perplexity": "{perplexity:.3f}",
    "change": "{perplexity_change:+.2%}",
    "Jaccard": _cell("jaccard", ".3f"),
    "hit 32": _cell("window_hit", ".3f"),
    "tokens/s": "{tokens_per_second:.1f}",
}


def selection_table(result: dict[str, Any]) -> str:
    """Quality of every policy at every budget."""
    settings = result["settings"]
    title = (
        f"{settings['model']} on {settings['text']}: {settings['context']:,} tokens are read, the "
        f"next {settings['steps']:,} decoded one by one; every {settings['sample_every']}th step "
        "is compared with exact attention in every sparse layer."
    )
    lines = table(_COLUMNS, [row for row in result["rows"] if row["part"] == "quality"])
    return "\n\n".join([title, lines, _LEGEND, machine_line(result["machine"])])


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
