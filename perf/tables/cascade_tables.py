"""What a bound on a sequence's host memory costs: perf/results/paper-cascade.json."""

from __future__ import annotations

import math
from typing import Any

from perf.tables.markdown import Columns, Row, table
from perf.tables.tables import machine_line

_MEASURES = ("slots", "kept", "condensed", "kl", "loss_change")


def cascade_table(result: dict[str, Any]) -> str:
    """Each share of the bytes and kind of merging; means over windows."""
    settings, rows = result["settings"], result["rows"]
    columns: Columns = {
        "of all bytes": "{share:.0%}",
        "what attention left behind": "{kind}",
        "slots": "{slots:,.0f}",
        "of them condensed": "{condensed:,.0f}",
        "KL": "{kl:.4f}",
        "in each quarter": "{quarters}",
        "perplexity": "{perplexity:+.2%}",
        "condensing, of decode time": "{condensing:.1%}",
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
        f"{settings['steps']:,} decoded; {windows} windows:\n\n{table(columns, lines)}\n\n"
        f"{machine_line(result['machine'], spreads=False)}"
    )


def _kind(kind: str, share: float) -> str:
    return kind if kind == "dropped" else f"{kind}, {share:.1%} of the slots"


def _line(row: Row, rows: list[Row], steps: int) -> Row:
    row = row | {name: sum(x[name] for x in rows) / len(rows) for name in _MEASURES}
    quarters = zip(*(x["kl_of_quarters"] for x in rows), strict=True)
    row["quarters"] = " ".join(f"{sum(quarter) / len(rows):.4f}" for quarter in quarters)
    row["perplexity"] = math.expm1(row["loss_change"])
    row["condensing"] = _condensing_share(rows, steps)
    return row


def _condensing_share(rows: list[Row], steps: int) -> float:
    """Of decode time in the long run: of what a token takes, in which it is condensed once."""
    seconds = sum(x["condense_seconds"] for x in rows)
    of_step = (sum(x["decode_seconds"] for x in rows) - seconds) / (steps * len(rows))
    of_token = seconds / max(1, sum(x["condensed_tokens"] for x in rows))
    return float(of_token / (of_token + of_step))
