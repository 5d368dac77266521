"""Pieces of the tables that README and docs show."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A GitHub table, numbers to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def mark(met: bool) -> str:
    """Whether a target was met."""
    return "met" if met else "**missed**"
