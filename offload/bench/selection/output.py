"""Selection measurements as rows of a table, CSV, Markdown and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # a SelectionMeasurement as JSON has it
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
UNKNOWN = "\N{EN DASH}"

LEGEND = (
    "attended: tokens per unit, on average. candidates: keys scored exactly. overlap: with the "
    "equally many most important tokens. mass: attention mass kept, sinks excluded; of top-k: "
    "relative to exact top-k at the same budget. error: relative L2 error of the attention "
    "output. KL (nats) and perplexity: of the next token, against full attention. Jaccard, "
    "hit 32: selected tokens against the last step's, and against the last 32 steps'."
)


# Header, key of the row, and how it is formatted.
COLUMNS = (
    ("budget", "budget_tokens", ","),
    ("attended", "attended_tokens", ",.0f"),
    ("candidates", "candidate_share", ".1%"),
    ("overlap", "overlap", ".3f"),
    ("mass", "mass_kept", ".4f"),
    ("of top-k", "mass_of_topk", ".4f"),
    ("error", "output_error", ".4f"),
    ("KL", "kl", ".4f"),
    ("perplexity", "perplexity", ".3f"),
    ("change", "perplexity_change", "+.2%"),
    ("Jaccard", "jaccard", ".3f"),
    ("hit 32", "window_hit", ".3f"),
    ("tokens/s", "tokens_per_second", ".1f"),
)


def cells(row: Row) -> list[str]:
    """The row's cells after the label, in the order of COLUMNS."""
    return [UNKNOWN if row[key] is None else format(row[key], spec) for _, key, spec in COLUMNS]


def markdown_table(rows: Sequence[Row]) -> str:
    """A GitHub table."""
    header = ["policy", *(name for name, _, _ in COLUMNS)]
    rule = ["---"] + ["---:"] * len(COLUMNS)
    lines = [header, rule, *([row["label"], *cells(row)] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def csv_table(rows: Sequence[Row]) -> str:
    """All fields, unrounded; the options as key=value pairs."""
    from offload.bench.selection.measure import SelectionMeasurement

    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(SelectionMeasurement.__dataclass_fields__))
    writer.writeheader()
    for row in rows:
        options = " ".join(f"{key}={value}" for key, value in row["options"].items())
        writer.writerow(row | {"options": options})
    return buffer.getvalue()


def check_plot(path: Path, option: str = "--plot") -> None:
    """Refuse a picture that could not be written in the end; messages name the command's `option`.

    Raises:
        ValueError: an unknown format, no such folder, or matplotlib is missing.
    """
    import importlib.util

    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"{option} {path}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib; install it with: pip install 'offload[plot]'")


def plot_selection(rows: Sequence[Row], path: Path, title: str) -> None:
    """Quality against budget: one line per policy, one panel per measure."""
    from matplotlib.figure import Figure

    panels = (
        ("mass_kept", "attention mass kept, sinks excluded", False),
        ("overlap", "overlap with the true top-k", False),
        ("kl", "KL of the next token, nats", True),
        ("perplexity_change", "perplexity change, %", False),
    )
    sparse = [row for row in rows if row["budget_tokens"] is not None]
    budgets = sorted({row["budget_tokens"] for row in sparse})
    labels = list(dict.fromkeys(row["label"] for row in sparse))
    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    for axes, (key, name, is_log) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for label in labels:
            points = sorted(
                (row["budget_tokens"], row[key])
                for row in sparse
                if row["label"] == label and row[key] is not None
            )
            scale = 100 if key == "perplexity_change" else 1
            axes.plot([x for x, _ in points], [y * scale for _, y in points], "o-", label=label)
        if is_log:
            axes.set_yscale("log")
        axes.set_xscale("log")
        axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
        axes.minorticks_off()
        axes.set_xlabel("budget, tokens per unit")
        axes.set_title(name, fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(path, dpi=120)
