"""Scores as rows of tables, and pictures of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = tuple[list[str], list[list[str]]]  # header, rows
UNKNOWN = "\N{EN DASH}"

LEGEND = (
    "Scores: the share of the right answers found, mean over samples. *: full attention scores "
    "nothing there; not in the mean. difference: to full attention, mean over tasks and lengths, "
    "95 % interval by a paired bootstrap. attended: tokens per decode step and KV head of the "
    "layers that select. Recent window: min(64, budget / 4), sinks: min(4, budget / 16), unless "
    "given."
)


def cell_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """A row per length and task, a column per policy, in per cent."""
    labels = list(cells[0]["scores"]) if cells else []
    rows = [
        [
            cell["task"] + ("" if cell["counts"] else " *"),
            f"{cell['length']:,}",
            str(cell["samples"]),
            *(f"{100 * cell['scores'][label]:.1f}" for label in labels),
        ]
        for cell in cells
    ]
    return ["task", "length", "samples", *labels], rows


def summary_table(summary: Sequence[Mapping[str, Any]]) -> Table:
    """A row per policy."""
    header = ["policy", "mean", "difference", "95 % interval", "attended", "tokens/s"]
    return header, [
        [
            line["policy"],
            _points(line["score"], ""),
            _points(line["difference"], "+"),
            _interval(line["interval"]),
            _number(line["attended_tokens"]),
            _number(_rate(line)),
        ]
        for line in summary
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def _rate(line: Mapping[str, Any]) -> float | None:
    """Decoded tokens per second, without what a policy builds first."""
    seconds: float = line["decode_seconds"]
    return line["decoded_tokens"] / seconds if seconds else None


def _points(share: float | None, sign: str) -> str:
    return UNKNOWN if share is None else f"{100 * share:{sign}.1f}"


def _interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return UNKNOWN
    low, high = (100 * share for share in interval)
    return f"{low:+.1f} … {high:+.1f}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"
