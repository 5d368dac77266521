"""The picture of the trade-off: quality by milliseconds per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.bench.decode.engines import GRAPH, STOCK, STOCK_ON_CPU
from perf.plots import FAINT, INK, load_pyplot, save_plot
from perf.tables.markdown import Row
from perf.tables.tradeoff_tables import devices_of, speed_of

_MARKERS = "osD^v"
_BASELINE_LINES = {GRAPH: ":", STOCK: "--", STOCK_ON_CPU: "--"}
_FARTHEST = 2.0  # of the slowest policy: baselines beyond are named, not drawn
_TICKS = [n * 10**e for e in range(-1, 4) for n in (1, 1.2, 1.5, 2, 3, 4, 5, 7)]
_WHERE = {"cuda": "with a GPU", "cpu": "CPU only"}
# On a light and on a dark background each has a contrast of at least 3 to 1.
_POLICY_COLORS = {
    "exact_topk": "#7d8590",
    "lfps": "#2f81f7",
    "lychee_cluster": "#e5404b",
    "sketch": "#a8681e",
    "per_head": "#2b9348",
    "union": "#8a63d2",
    "lychee_decode": "#d6409f",
    "tidal_decode": "#0b8f9c",
    "quest": "#d9730d",
    "streaming_llm": "#7a8f00",
}
# Of a policy: (budget or None, milliseconds, score) each.
_Curve = list[tuple[int | None, float, float]]


def plot_tradeoff(result: dict[str, Any], path: Path) -> None:
    """Quality by milliseconds per token at the shortest and the longest context of each device."""
    rows = result["rows"]
    devices, lengths = devices_of(rows), sorted({row["length"] for row in rows})
    ends = list(dict.fromkeys((lengths[0], lengths[-1])))
    figure, all_axes = load_pyplot().subplots(
        len(devices),
        len(ends),
        figsize=(5.5 * len(ends), 3.9 * len(devices)),
        sharey="col",
        squeeze=False,
    )
    names: dict[str, Any] = {}
    for device, of_device in zip(devices, all_axes, strict=True):
        for length, axes in zip(ends, of_device, strict=True):
            curves = _curves(result, device, length)
            names |= _draw_policies(axes, curves)
            _draw_baselines(axes, rows, device, length, curves)
            axes.set_xscale("log")
            least, most = axes.get_xlim()
            ticks = [tick for tick in _TICKS if least <= tick <= most]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
            axes.set_xlim(least, most)
            axes.set_ylim(-3, 95)
            axes.set_title(f"{length:,} tokens, {_WHERE[device]}")
            axes.grid(alpha=0.3)
        of_device[0].set_ylabel("RULER, % right")
    for axes in all_axes[-1]:
        axes.set_xlabel("ms per token, batch 1")
    figure.legend(
        list(names.values()),
        list(names),
        fontsize="small",
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=6,
    )
    save_plot(figure, path, result)


def _curves(result: dict[str, Any], device: str, length: int) -> dict[str, _Curve]:
    """By policy: (budget, milliseconds, score) of each budget; of `full` the budget is None."""
    rows = result["rows"]
    scores = {
        row["label"]: row["score"]
        for row in rows
        if (row["part"], row["length"]) == ("quality", length)
    }
    found: dict[str, _Curve] = {}
    for label, options in result["settings"]["policies"].items():
        speed, score = speed_of(rows, device, length, label), scores.get(label)
        if speed is not None and score is not None:
            point = (options.get("budget_tokens"), speed["milliseconds"], 100 * score)
            found.setdefault(label.split(" ")[0], []).append(point)
    return found


def _draw_policies(axes: Any, curves: dict[str, _Curve]) -> dict[str, Any]:
    """A colour for each policy, a marker for each budget, and a line that joins them; the lines by
    policy, for a legend."""
    budgets = sorted({budget or 0 for curve in curves.values() for budget, *_ in curve} - {0})
    lines = {}
    for policy, curve in curves.items():
        color = _POLICY_COLORS.get(policy, INK)
        for budget, x, y in curve:
            marker = "*" if budget is None else _MARKERS[budgets.index(budget) % len(_MARKERS)]
            axes.plot(x, y, marker=marker, markersize=12 if budget is None else 6, color=color)
        at, scores = [x for _, x, _ in curve], [y for *_, y in curve]
        (lines[policy],) = axes.plot(at, scores, color=color, linewidth=1)
    return lines


def _draw_baselines(
    axes: Any, rows: Sequence[Row], device: str, length: int, curves: dict[str, _Curve]
) -> None:
    """Named lines; of what is far beyond all policies only the name."""
    slowest = max((x for curve in curves.values() for _, x, _ in curve), default=math.inf)
    num_far = 0
    for engine, style in _BASELINE_LINES.items():
        speed, name = speed_of(rows, device, length, engine), engine.split(",")[0]
        if speed is None:
            continue
        milliseconds = speed["milliseconds"]
        if milliseconds < _FARTHEST * slowest:
            axes.axvline(milliseconds, color=FAINT, linestyle=style)
            place, rotation, text = (milliseconds, 0.03), 90, name
            transform, align = axes.get_xaxis_transform(), "left"
        else:
            place, rotation = (0.98, 0.02 + 0.06 * num_far), 0
            text = f"{name} {milliseconds:,.0f} ms \N{RIGHTWARDS ARROW}"
            transform, align = axes.transAxes, "right"
            num_far += 1
        axes.text(
            *place,
            text,
            transform=transform,
            rotation=rotation,
            ha=align,
            va="bottom",
            color=FAINT,
            fontsize="small",
        )
