"""What one share of the attention for all heads saves: perf/results/paper-hard-kv.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offload.bench.budget.equal_error import tokens_of_equal_error
from perf.tables.markdown import TIMES, Columns, Row, table
from perf.tables.tables import machine_line

_MEASURES = ("attended_tokens", "output_error", "mass_kept", "kl", "loss_change")


def hard_kv_table(result: dict[str, Any]) -> str:
    """Each policy with fixed budgets and with shares, by length; means over texts."""
    settings, parts = result["settings"], []
    columns: Columns = {
        "policy": "`{inner}`",
        "budget": "{budget}",
        "attended": "{attended_tokens:,.0f}",
        "error": "{output_error:.3f}",
        f"{TIMES} tokens of a fixed budget, same error": "{by_error}",
        "KL": "{kl:.4f}",
        f"{TIMES} tokens, same KL": "{by_kl}",
        "mass kept": "{mass_kept:.1%}",
        "perplexity": "{perplexity:+.2%}",
    }
    for length in settings["lengths"]:
        of_length = [row for row in result["rows"] if row["length"] == length]
        texts = {(row["text"], row["window"]) for row in of_length}
        lines = [_line(x) for x in _means(of_length) if x["inner"] != "full"]
        for line in lines:
            inner = line["inner"].split(",")[0]  # behind it is how it was calibrated
            fixed = [x for x in lines if x["inner"] == inner and "top_p" not in x]
            for name, measure in (("by_error", "output_error"), ("by_kl", "kl")):
                line[name] = _ratio(line, fixed, measure) if "top_p" in line else ""
        kinds = sorted({text for text, _ in texts})
        parts.append(
            f"**{length:,} tokens** of {' and '.join(kinds)} of {settings['model']}, "
            f"{len(texts)} windows, {settings['steps']} steps each; a share's cap is "
            f"{settings['most']:,} tokens:\n\n{table(columns, lines)}"
        )
    return "\n\n".join([*parts, machine_line(result["machine"], spreads=False)])


def _means(rows: Sequence[Row]) -> list[Row]:
    """Over the texts, of each policy in the order of the file."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row["inner"], row.get("budget_tokens"), row.get("top_p"))
        found.setdefault(key, []).append(row)
    names = ("inner", "budget_tokens", "top_p")
    return [
        {name: x for name, x in zip(names, key, strict=True) if x is not None}
        | {name: sum(row[name] for row in of_key) / len(of_key) for name in _MEASURES}
        for key, of_key in found.items()
    ]


def _line(row: Row) -> Row:
    budget = f"{row['top_p']:.0%}" if "top_p" in row else f"{row['budget_tokens']:,}"
    return row | {"budget": budget, "perplexity": math.expm1(row["loss_change"])}


def _ratio(row: Row, fixed: Sequence[Row], measure: str) -> str:
    """Of the tokens that a fixed budget needs for as much of a measure."""
    known = [(x["attended_tokens"], x[measure]) for x in fixed]
    tokens = tokens_of_equal_error(row[measure], known)
    return "" if tokens is None else f"{row['attended_tokens'] / tokens:.2f}"
