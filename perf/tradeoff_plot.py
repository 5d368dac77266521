"""The picture of the trade-off: quality by milliseconds per token, with names at the points."""

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
_CHARACTER_POINTS = 5.2  # width of a character of small text
_LINE_POINTS = 9.0
_NEAR_POINTS = 14.0  # names farther from their points have a line
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
    points: list[tuple[Any, dict[str, _Curve]]] = []
    for device, of_device in zip(devices, all_axes, strict=True):
        for length, axes in zip(ends, of_device, strict=True):
            curves = _curves(result, device, length)
            _draw_policies(axes, curves)
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
            points.append((axes, curves))
        of_device[0].set_ylabel("RULER, % right")
    for axes in all_axes[-1]:
        axes.set_xlabel("ms per token, batch 1")
    figure.tight_layout()  # as in `save_plot`: where labels have room depends on it
    for axes, curves in points:
        _label_policies(axes, curves)
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


def _draw_policies(axes: Any, curves: dict[str, _Curve]) -> None:
    """A colour for each policy, a marker for each budget, and a line that joins them."""
    budgets = sorted({budget or 0 for curve in curves.values() for budget, *_ in curve} - {0})
    for policy, curve in curves.items():
        color = _POLICY_COLORS.get(policy, INK)
        axes.plot([x for _, x, _ in curve], [y for *_, y in curve], color=color, linewidth=1)
        for budget, x, y in curve:
            marker = "*" if budget is None else _MARKERS[budgets.index(budget) % len(_MARKERS)]
            axes.plot(x, y, marker=marker, markersize=12 if budget is None else 6, color=color)


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


def _label_policies(axes: Any, curves: dict[str, _Curve]) -> None:
    """A name near the point of each policy's largest budget."""
    to_points = 72 / axes.figure.dpi
    inside = _box(*(to_points * edge for edge in axes.bbox.extents))
    at = {
        policy: [tuple(to_points * axes.transData.transform((x, y))) for _, x, y in curve]
        for policy, curve in curves.items()
    }
    taken = [_box_around(x, y, 7, 7) for points in at.values() for x, y in points]
    for policy, points in sorted(at.items(), key=lambda item: -item[1][0][1]):
        largest = max(range(len(points)), key=lambda i: curves[policy][i][0] or 0)
        x, y = points[largest]
        box = _free_box(x, y, _CHARACTER_POINTS * len(policy), inside, taken)
        taken.append(box)
        dx, dy = (box.x0 + box.x1) / 2 - x, (box.y0 + box.y1) / 2 - y
        line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        is_far = math.hypot(max(0.0, abs(dx) - box.width / 2), dy) > _NEAR_POINTS
        label = axes.annotate(
            policy,
            curves[policy][largest][1:],
            (dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            color=_POLICY_COLORS.get(policy, INK),
            fontsize="small",
            arrowprops=line if is_far else None,
        )
        label.set_in_layout(False)


def _free_box(x: float, y: float, width: float, inside: Any, taken: Sequence[Any]) -> Any:
    """The nearest place for a name at a point that covers nothing; the one that covers least if
    there is none."""
    found, least = None, math.inf
    for distance in range(9, 100, 3):
        for angle in range(0, 360, 15):
            away_x, away_y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            centre_x = x + distance * away_x + width / 2 * max(-1, min(1, 2 * away_x))
            box = _box_around(centre_x, y + distance * away_y, width, _LINE_POINTS)
            covered = box.count_overlaps(taken)
            is_inside = inside.contains(*box.min) and inside.contains(*box.max)
            covered += 0 if is_inside else len(taken)
            if covered < least:
                found, least = box, covered
        if least == 0:
            break
    return found


def _box_around(x: float, y: float, width: float, height: float) -> Any:
    """A rectangle of a figure, in points."""
    return _box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _box(*edges: float) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(*edges)
