"""What cache correction brings back in a long answer, and what it costs:
perf/results/paper-correction*.json.
"""

from __future__ import annotations

import math
from typing import Any

from perf.tables.markdown import Columns, Row, table
from perf.tables.tables import machine_line


def correction_table(result: dict[str, Any]) -> str:
    """Each policy, corrected every so many tokens; means over windows."""
    settings, rows = result["settings"], result["rows"]
    columns: Columns = {
        "policy": "{policy}",
        "corrected every": "{corrected}",
        "KL": "{kl:.4f}",
        "of uncorrected": "{share}",
        "in each quarter": "{quarters}",
        "perplexity": "{perplexity:+.2%}",
    }
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of_policy = [row for row in rows if row["policy"] == policy]
        never = _mean("kl", [row for row in of_policy if row["every"] is None])
        for every in dict.fromkeys(row["every"] for row in of_policy):
            lines.append(_line([row for row in of_policy if row["every"] == every], never))
    windows = len({row["window"] for row in rows})
    return (
        f"**{settings['length']:,} tokens** of {settings['text']} of {settings['model']} read, "
        f"{settings['steps']:,} decoded with a budget of {settings['budget_tokens']:,}; {windows} "
        f"window{'s' * (windows > 1)}:\n\n"
        f"{table(columns, lines)}\n\n{machine_line(result['machine'], spreads=False)}"
    )


def time_table(result: dict[str, Any]) -> str:
    """Each policy, its tokens with corrections beside those without."""
    settings = result["settings"]
    columns: Columns = {
        "policy": "{policy}",
        "ms a token": "{ms_per_token:.2f}",
        "corrected": "{ms_per_token_corrected:.2f}",
        "more": "{added_share:+.1%}",
        "seconds a correction": "{seconds_per_correction:.3f}",
        "ms of the step with it": "{correcting_step_ms:.1f}",
        "of the next": "{next_step_ms:.2f}",
        "of others": "{step_ms:.2f}",
    }
    of = settings["model"] or f"{settings['shape']} with random weights"
    device = "the CPU" if settings["device"] == "cpu" else "a GPU, the KV cache on the host"
    return (
        f"**{settings['length']:,} tokens** read, {settings['steps']:,} decoded by {of} on "
        f"{device}, a budget of {settings['budget_tokens']:,}, corrected every "
        f"{settings['every']:,}; medians of {settings['repeats']} passes each:\n\n"
        f"{table(columns, result['rows'])}\n\n{machine_line(result['machine'], spreads=False)}"
    )


def _line(rows: list[Row], never: float) -> Row:
    every, kl = rows[0]["every"], _mean("kl", rows)
    quarters = zip(*(row["kl_of_quarters"] for row in rows), strict=True)
    return {
        "policy": rows[0]["policy"],
        "corrected": "never" if every is None else f"{every:,} tokens",
        "kl": kl,
        "share": "-" if every is None else f"{kl / never:.0%}",
        "quarters": " ".join(f"{sum(x) / len(x):.4f}" for x in quarters),
        "perplexity": math.expm1(_mean("loss_change", rows)),
    }


def _mean(name: str, rows: list[Row]) -> float:
    return float(sum(row[name] for row in rows) / len(rows))
