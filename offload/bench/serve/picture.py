"""Loads as curves: throughput and latencies by clients, of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PANELS = {
    "answer_tokens_per_second": "tokens/s of answers",
    "ttft_ms_median": "ms to the first token, median",
    "gap_ms_p99": "ms between tokens, p99",
}


def plot_loads(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """A panel for each measure; a curve for each engine and lengths of prompts and answers."""
    from matplotlib.figure import Figure

    curves: dict[str, list[dict[str, Any]]] = {}
    several = len({(*row["prompt_tokens"], row["answer_tokens"]) for row in rows}) > 1
    for row in rows:
        lengths = f", {row['prompt_tokens'][1]:,} + {row['answer_tokens']:,}" if several else ""
        curves.setdefault(row["engine"] + lengths, []).append(row)
    figure = Figure(figsize=(4.0 * len(_PANELS), 3.6), layout="constrained")
    panels = figure.subplots(1, len(_PANELS))
    by = "clients" if rows[0]["rate"] is None else "rate"
    for axes, (name, label) in zip(panels, _PANELS.items(), strict=True):
        for curve, of_curve in curves.items():
            points = [(row[by], row[name]) for row in of_curve if row[name] is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=curve)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("clients" if by == "clients" else "requests per second")
        axes.set_title(label, fontsize="medium")
    panels[0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)
