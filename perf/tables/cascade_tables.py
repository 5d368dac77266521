"""What a bound on a sequence's host memory costs: perf/results/paper-cascade.json and -long."""

from __future__ import annotations

import math
from typing import Any

from offload.bench.budget.drift import last_to_second
from perf.tables.markdown import Columns, Row, table
from perf.tables.tables import machine_line

_MEASURES = ("slots", "kept", "condensed", "kl", "loss_change")


def cascade_table(result: dict[str, Any]) -> str:
    """Each share of the bytes and way to condense; means over windows."""
    says_reading = all("prompt_seconds" in row for row in result["rows"])  # older ones do not
    reading = {"reading, to all bytes": "{reading:.2f} x"} if says_reading else {}
    return _table(
        result,
        {
            "slots": "{slots:,.0f}",
            "of them condensed": "{condensed:,.0f}",
            "KL": "{kl:.4f}",
            "in each quarter": "{kl_of_quarters}",
            "perplexity": "{perplexity:+.2%}",
            "condensing, of decode time": "{condensing:.1%}",
            **reading,
        },
    )


def long_generation_table(result: dict[str, Any]) -> str:
    """The same with the error of attention's output, and what has become of it in the end."""
    return _table(
        result,
        {
            "slots": "{slots:,.0f}",
            "error in each quarter": "{error_of_quarters}",
            "4th / 2nd": "{error_growth}",
            "KL": "{kl:.4f}",
            "in each quarter": "{kl_of_quarters}",
            "KL, 4th / 2nd": "{kl_growth}",
            "perplexity": "{perplexity:+.2%}",
        },
    )


def _table(result: dict[str, Any], of_rows: Columns) -> str:
    settings, rows = result["settings"], result["rows"]
    columns: Columns = {
        "of all bytes": "{share:.0%}",
        "condensed by": "{kind}",
        **of_rows,
    }
    keys = list(dict.fromkeys((row["share"], row["kind"], row["condensed_share"]) for row in rows))
    lines = [
        _line(
            {"share": key[0], "kind": _kind(key[1], key[2])},
            [row for row in rows if (row["share"], row["kind"], row["condensed_share"]) == key],
            settings["steps"],
        )
        for key in keys
    ]
    windows = len({row["window"] for row in rows})
    return (
        f"**{settings['length']:,} tokens** of {settings['text']} of {settings['model']} read, "
        f"{settings['steps']:,} decoded; {windows} window{'s' * (windows > 1)}:\n\n"
        f"{table(columns, lines)}\n\n{machine_line(result['machine'], spreads=False)}"
    )


def _kind(kind: str, share: float) -> str:
    return f"{kind}, {share:.1%} of the slots" if share else kind


def _line(row: Row, rows: list[Row], steps: int) -> Row:
    row = row | {name: sum(x[name] for x in rows) / len(rows) for name in _MEASURES}
    for name in ("kl", "error"):
        if f"{name}_of_quarters" in rows[0]:  # older results have no errors
            quarters = zip(*(x[f"{name}_of_quarters"] for x in rows), strict=True)
            means = [sum(quarter) / len(rows) for quarter in quarters]
            row[f"{name}_of_quarters"] = " ".join(f"{mean:.4f}" for mean in means)
            growth = last_to_second(means)
            row[f"{name}_growth"] = "-" if growth is None else f"{growth:.2f}"
    row["perplexity"] = math.expm1(row["loss_change"])
    if "prompt_seconds" in rows[0]:
        of_full = sum(x["full_prompt_seconds"] for x in rows)
        row["reading"] = sum(x["prompt_seconds"] for x in rows) / of_full
    if "condensed_tokens" in rows[0]:  # older results do not say it
        row["condensing"] = _condensing_share(rows, steps)
    return row


def _condensing_share(rows: list[Row], steps: int) -> float:
    """Of decode time in the long run: of what a token takes, in which it is condensed once."""
    seconds = sum(x["condense_seconds"] for x in rows)
    of_step = (sum(x["decode_seconds"] for x in rows) - seconds) / (steps * len(rows))
    of_token = seconds / max(1, sum(x["condensed_tokens"] for x in rows))
    return float(of_token / (of_token + of_step))
