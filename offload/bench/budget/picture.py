"""A picture of budgets: maps of heads, utilisation (HARD-KV's Figure 9), tokens against error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offload.bench.budget.drift import QUARTERS
from offload.bench.budget.measure import BudgetMeasurement
from offload.bench.budget.output import adaptive_of, budget_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[BudgetMeasurement]


def plot_budgets(rows: Rows, path: Path, title: str) -> None:
    """A line of panels for each policy whose heads differ, or else for all that select.

    Its heads' median tokens by layer, the true ones in the same colours, and the former sorted
    beside the cap; below, error against tokens, and by quarter where tokens were generated.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    mapped = adaptive_of(rows) or [row for row in rows if row.heads]
    figure = Figure(figsize=(12.5, 3.4 * (len(mapped) + 1)), layout="constrained")
    panels = figure.subplots(len(mapped) + 1, 3, squeeze=False)
    counts = [x for row in mapped for h in row.heads for x in (h.attended_median, h.true_median)]
    norm = LogNorm(max(1, min(counts, default=1)), max(2, max(counts, default=2)))
    for (chosen, true, used), row in zip(panels, mapped, strict=False):
        name = f"{row.label}, {budget_of(row)}"
        for axes, key, what in (
            (chosen, "attended_median", f"{name}:\ntokens attended"),
            (true, "true_median", f"true top-{row.needed_top_p}"),
        ):
            image = _heat_map(axes, row, key, norm)
            axes.set_title(what, fontsize="medium")
            axes.set_ylabel("layer")
        figure.colorbar(image, ax=[chosen, true], label="tokens, median of steps")
        _utilisation(used, row)
    _error_by_tokens(panels[-1][0], rows)
    _error_by_quarter(panels[-1][1], rows)
    panels[-1][2].axis("off")
    handles, names = panels[-1][1].get_legend_handles_labels()
    panels[-1][2].legend(handles, names, loc="center left", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def head_map(row: BudgetMeasurement, key: str) -> np.ndarray:
    """[num_layers, num_heads] of one of `HeadCounts`' numbers; NaN in dense layers."""
    shape = [1 + max(getattr(head, name) for head in row.heads) for name in ("layer", "head")]
    found = np.full(shape, np.nan)
    for head in row.heads:
        found[head.layer, head.head] = getattr(head, key)
    return found


def _heat_map(axes: Axes, row: BudgetMeasurement, key: str, norm: object) -> object:
    tokens = head_map(row, key)
    image = axes.imshow(tokens, norm=norm, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(tokens.shape[1]))
    axes.set_xlabel("head")
    return image


def _utilisation(axes: Axes, row: BudgetMeasurement) -> None:
    """Heads by what they attend to, below the cap (Figure 9)."""
    attended = sorted((head.attended_median for head in row.heads), reverse=True)
    axes.fill_between(range(len(attended)), attended, step="mid", alpha=0.8)
    axes.axhline(row.budget_tokens or 0, color="black", linestyle="--")
    axes.set_xlabel("heads of all layers, sorted")
    axes.set_ylabel("tokens, median of steps")
    axes.set_title(f"{row.utilisation:.0%} of {row.budget_tokens:,} attended", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def _error_by_tokens(axes: Axes, rows: Rows) -> None:
    kinds = dict.fromkeys((row.label, row.top_p is not None) for row in rows if row.heads)
    for label, adaptive in kinds:
        points = sorted(
            (row.attended_tokens, row.output_error)
            for row in rows
            if (row.label, row.top_p is not None) == (label, adaptive)
            if row.attended_tokens and row.output_error
        )
        style = "s-" if adaptive else "o--"
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    budgets = {row.budget_tokens for row in rows if row.top_p is None and row.budget_tokens}
    if budgets:
        axes.set_xticks(sorted(budgets), [f"{count:,}" for count in sorted(budgets)])
        axes.xaxis.minorticks_off()
    axes.set_xlabel("tokens attended per head")
    axes.set_title("error of the attention output", fontsize="medium")
    axes.legend(fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def _error_by_quarter(axes: Axes, rows: Rows) -> None:
    generated = [row for row in rows if row.heads and row.drift.output_error]
    if not generated:
        axes.set_visible(False)
        return
    quarters = range(1, QUARTERS + 1)
    for row in generated:
        errors = [np.nan if x is None else x for x in row.drift.output_error]
        axes.plot(quarters, errors, "o-", label=f"{row.label}, {budget_of(row)}")
    axes.set_xticks(quarters)
    axes.set_yscale("log")
    axes.set_xlabel("quarter of the generated tokens")
    axes.set_title("error of the attention output", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
