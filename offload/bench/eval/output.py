"""Scores as rows of tables, and pictures of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.system.installing import missing_extra

Table = tuple[list[str], list[list[str]]]  # header, rows
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
PLOT_COLUMNS = 4
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


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
    return _with_bounds(
        summary,
        header,
        [
            [
                line["policy"],
                _points(line["score"], ""),
                _points(line["difference"], "+"),
                _interval(line["interval"]),
                _number(line["attended_tokens"]),
                _number(_rate(line)),
            ]
            for line in summary
        ],
    )


def perplexity_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per length and policy; with what steps that were judged say, where there are any."""
    judged = _JUDGED if any("mass_kept" in row for row in rows) else {}
    header = ["policy", "length", "perplexity", "change", "95 % interval", "KL", *judged]
    header += ["attended", *(["scored"] if judged else []), "tokens/s"]
    return _with_bounds(
        rows,
        header,
        [
            [
                row["policy"],
                f"{row['length']:,}",
                f"{row['perplexity']:.3f}",
                f"{row['change']:+.2%}",
                UNKNOWN
                if row["interval"] is None
                else " … ".join(f"{change:+.2%}" for change in row["interval"]),
                f"{row['kl']:.5f}",
                *(_number(row.get(name), form) for name, form in judged.values()),
                _number(row["attended_tokens"]),
                *([_number(row["scored_tokens"])] if judged else []),
                _number(_rate(row)),
            ]
            for row in rows
        ],
    )


def _with_bounds(
    lines: Sequence[Mapping[str, Any]], header: list[str], cells: list[list[str]]
) -> Table:
    """Cells of a table, with what bounds allowed and took where any of its lines has one."""
    if not any("slots" in line for line in lines):
        return header, cells
    names = ("slots", "condensed_tokens")
    of_bounds = [[_number(line.get(name)) for name in names] for line in lines]
    both = zip(cells, of_bounds, strict=True)
    return [*header, "slots", "condensed"], [[*row, *of_bound] for row, of_bound in both]


def check_plot(path: Path, option: str = "--plot") -> None:
    """Refuse a picture that could not be written in the end; messages name the command's `option`.

    Raises:
        ValueError: an unknown format, no such folder, or matplotlib is missing.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"{option} {path}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(missing_extra("plot", option) or f"{option} needs matplotlib")


def plot_cells(cells: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """A picture per policy: scores by task (from above) and length, in colours."""
    from matplotlib.figure import Figure

    labels = list(cells[0]["scores"])
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    lengths = sorted({cell["length"] for cell in cells})
    across = min(len(labels), PLOT_COLUMNS)
    down = -(-len(labels) // across)
    figure = Figure(figsize=(3.2 * across + 0.8, 0.35 * len(tasks) * down + 1.6 * down))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(labels) :]:
        axes.set_visible(False)
    for axes, label in zip(panels.flat, labels, strict=False):
        scores = [[float("nan")] * len(lengths) for _ in tasks]
        for cell in cells:
            place = tasks.index(cell["task"]), lengths.index(cell["length"])
            scores[place[0]][place[1]] = 100 * cell["scores"][label]
        image = axes.imshow(scores, vmin=0, vmax=100, aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(tasks)), tasks)
        axes.set_title(label, fontsize="medium")
    figure.colorbar(image, ax=panels, label="score, %")
    figure.supxlabel("tokens", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


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


def _number(value: float | None, form: str = ",.0f") -> str:
    return UNKNOWN if value is None else format(value, form)
