"""Pieces of the tables that README and docs show."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from offload.bench.eval.output import markdown

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]
DEFAULT_BUDGET_TOKENS = 1024  # of results that do not say it
TIMES = "\N{MULTIPLICATION SIGN}"
LLAMA_CPP_NOTE = "llama.cpp runs the GGUF's Q4_1 weights, the others bfloat16, or what they name."
FLOAT32_NOTE = "With float32 in its name, an engine has its weights and KV cache in float32."


def table(columns: Columns, rows: Iterable[Any]) -> str:
    """A line of each row.

    Args:
        columns: by header, what makes a cell of a row: a format string of its values, or a
            function.
        rows: mappings, or what all of the functions take.
    """
    makers = [
        column.format_map if isinstance(column, str) else column for column in columns.values()
    ]
    return markdown(list(columns), [[make(row) for make in makers] for row in rows])


def by_context(
    rows: Iterable[Row], name: Callable[[Row], Hashable], key: str = "kv_len"
) -> list[dict[Any, Any]]:
    """A row for `table` of each name: "name", and by context the row that was measured there."""
    found: dict[Hashable, dict[Any, Any]] = {}
    for row in rows:
        found.setdefault(name(row), {"name": name(row)})[row[key]] = row
    return list(found.values())


def context_columns(
    rows: Iterable[Row], cell: Callable[[Row], str], key: str = "kv_len"
) -> dict[str, Callable[[Any], str]]:
    """Columns of rows that `by_context` made; empty where nothing was measured."""

    def of_context(n: int) -> Callable[[Any], str]:
        return lambda of_name: cell(of_name[n]) if n in of_name else ""

    return {f"{n:,} tokens": of_context(n) for n in sorted({row[key] for row in rows})}


def median(name: str, form: str) -> Callable[[Row], str]:
    """The cell of a median, with half of the 10th to 90th percentile."""

    def cell(row: Row) -> str:
        spread = (row[f"{name}_p90"] - row[f"{name}_p10"]) / 2
        return f"{row[name]:{form}} ± {spread:{form}}"

    return cell


def known(name: str, form: str) -> Callable[[Row], str]:
    """A cell that is empty where the value is None."""
    return lambda row: "" if row[name] is None else format(row[name], form)


def tokens(count: int) -> str:
    """A number of tokens in a header."""
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def folded(summary: str, content: str) -> str:
    """Markdown that GitHub and the site show when a reader opens it."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{content}\n\n</details>'


def policy_options_note(budget_tokens: int = DEFAULT_BUDGET_TOKENS) -> str:
    """Which options the policies of a table of speed had, and where the same are judged."""
    return (
        f"Policies with a budget of {budget_tokens:,} tokens and otherwise default options; what "
        "they lose with these: [results](results.md), of a model of 135M parameters at 32K tokens "
        "and less."
    )
