"""Scores as rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

Table = tuple[list[str], list[list[str]]]  # header, rows
Columns = dict[str, Callable[[Mapping[str, Any]], str]]  # by header
UNKNOWN = "\N{EN DASH}"

LEGEND = (
    "Scores: the share of the right answers found, mean over samples. *: full attention scores "
    "nothing there; not in the mean. difference: to full attention, mean over tasks and lengths, "
    "with its 95 % interval. attended: tokens per decode step, layer and KV head, dense layers "
    "included. Sinks and recent window: the policy's defaults, of a budget at most 1/16 and 1/4, "
    "unless given."
)

HARD_LEGEND = LEGEND.replace(
    "full attention scores nothing there", "full attention has below 30 or above 97 points there"
)
PERPLEXITY_LEGEND = (
    "change: of the perplexity, relative to full attention's, 95 % interval by Student's t of the "
    "windows' differences. attended: tokens per decode step, layer and KV head."
)
INT8_LEGEND = (
    " KL: from full attention over keys and values in the model's dtype, so that of `full` is what "
    "int8 alone changes."
)
SELECTIONS_LEGEND = (
    " Of layers that no policy has dense: error: relative L2 error of attention's output. overlap: "
    "share of the selected tokens that are among the equally many most important ones. mass: "
    "attention mass kept, sinks excluded; of top-k: relative to exact top-k with the same budget. "
    "scored: tokens whose keys are scored exactly, counted as attended. tokens/s: of the other "
    "steps."
)
BOUND_LEGEND = (
    " host=SHARE: prompt and answer within this share of the bytes of their keys and values. "
    "slots: tokens that the KV cache has then room for; condensed: tokens that have lost theirs at "
    "the end, mean over prompts."
)
# Header: key of the row, and how it is formatted.
_JUDGED = {
    "error": ("output_error", ".4f"),
    "overlap": ("overlap", ".3f"),
    "mass": ("mass_kept", ".4f"),
    "of top-k": ("mass_of_topk", ".4f"),
}


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
    columns: Columns = {
        "policy": lambda line: line["policy"],
        "mean": lambda line: _points(line["score"], ""),
        "difference": lambda line: _points(line["difference"], "+"),
        "95 % interval": lambda line: _interval(line["interval"]),
        "KL": partial(_known, "kl", ".5f"),
        "attended": lambda line: _number(line["attended_tokens"]),
        "tokens/s": lambda line: _number(_rate(line)),
    }
    if not any(line.get("kl") is not None for line in summary):
        del columns["KL"]
    return _table(summary, columns)


def perplexity_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per length and policy; with what steps that were judged say, where there are any."""
    columns: Columns = {
        "policy": lambda row: row["policy"],
        "length": lambda row: f"{row['length']:,}",
        "perplexity": lambda row: f"{row['perplexity']:.3f}",
        "change": lambda row: f"{row['change']:+.2%}",
        "95 % interval": lambda row: _interval(row["interval"], "+.2%"),
        "KL": lambda row: f"{row['kl']:.5f}",
        **{name: partial(_known, key, form) for name, (key, form) in _JUDGED.items()},
        "attended": lambda row: _number(row["attended_tokens"]),
        "scored": lambda row: _number(row["scored_tokens"]),
        "tokens/s": lambda row: _number(_rate(row)),
    }
    if not any("mass_kept" in row for row in rows):
        columns = {name: columns[name] for name in columns if name not in (*_JUDGED, "scored")}
    return _table(rows, columns)


def _table(lines: Sequence[Mapping[str, Any]], columns: Columns) -> Table:
    """With what bounds allowed and took where any of the lines has one."""
    if any("slots" in line for line in lines):
        columns |= {
            "slots": partial(_known, "slots", ",.0f"),
            "condensed": partial(_known, "condensed_tokens", ",.0f"),
        }
    return list(columns), [[cell(line) for cell in columns.values()] for line in lines]


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


def _interval(interval: Sequence[float] | None, form: str = "") -> str:
    """In points, or as another format of shares has them."""
    if interval is None:
        return UNKNOWN
    return " … ".join(format(x, form) if form else f"{100 * x:+.1f}" for x in interval)


def _known(name: str, form: str, line: Mapping[str, Any]) -> str:
    return _number(line.get(name), form)


def _number(value: float | None, form: str = ",.0f") -> str:
    return UNKNOWN if value is None else format(value, form)
