"""Plots of README and docs, drawn from perf/results by `perf.report`.

The same results give the same file. A file holds a digest of the results it shows, so that
`is_current` needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.bench.decode.engines import GRAPH, OURS, STOCK, STOCK_OFFLOADED, STOCK_ON_CPU
from offload.system.memory import format_bytes
from perf.tables.gpu_tables import Results, decode_rows, engine_name
from perf.tables.markdown import DEFAULT_BUDGET_TOKENS, LLAMA_CPP_NOTE, Row
from perf.tables.tradeoff_tables import devices_of, speed_of

_HUES = {"offload": "Blues", "transformers": "Greys", "llama.cpp": "Oranges", GRAPH: "Greens"}
_GPU_ENGINES = (STOCK_OFFLOADED, STOCK, GRAPH, OURS)
_GPU_POLICIES = ("tidal_decode", "lychee_cluster", "lfps")
_CPU_ENGINES = (
    *("transformers", "transformers, static cache", "llama.cpp", "llama.cpp, flash attention"),
    *("offload full", "offload exact_topk"),
)


_MARKERS = "osD^v"
_BASELINE_LINES = {GRAPH: ":", STOCK: "--", STOCK_ON_CPU: "--"}
_FARTHEST = 2.0  # of the slowest policy: baselines beyond are named, not drawn
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
# Colours of text, of what matters less and of the background, on a light page and a dark one.
_INK, _FAINT, _PAPER = "#1f2328", "#818b98", "#ffffff"
_DARK = {_INK: "#e6edf3", _FAINT: "#848d97", _PAPER: "#0d1117"}
_TICKS = [n * 10**e for e in range(-1, 4) for n in (1, 1.2, 1.5, 2, 3, 4, 5, 7)]
_WHERE = {"cuda": "with a GPU", "cpu": "CPU only"}

# Of a policy: (budget or None, milliseconds, score) each.
_Curve = list[tuple[int | None, float, float]]
# By engine: (context, median, 10th and 90th percentile of the milliseconds per token) each.
_Lines = dict[str, list[tuple[int, float, float, float]]]


def plot_decode(result: dict[str, Any], path: Path) -> None:
    """Decode speed by context length, as bars."""
    pyplot = _pyplot()
    rows = result["rows"]
    contexts = sorted({row["context"] for row in rows})
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 3.4))
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        speeds = [r["decode_tokens_per_second"] for r in rows if r["engine"] == engine]
        positions = [x + (i - (len(engines) - 1) / 2) * width for x in range(len(contexts))]
        axes.bar(positions, speeds, width, label=engine, color=_color(engine, engines))
    axes.set_xticks(range(len(contexts)), [f"{context:,} tokens" for context in contexts])
    axes.set_ylabel("decode, tokens/s")
    axes.set_title(f"{result['settings']['model']}, {result['settings']['threads']} CPU threads")
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path, result)


def plot_training(log: list[Row], path: Path) -> None:
    """Losses of a training by its minutes: each step, and the mean of the 15 around it."""
    figure, all_axes = _pyplot().subplots(1, 3, figsize=(11, 3.2))
    names = {"tasks": "tasks, nll", "text": "text, nll", "keep": "short text, KL to stock"}
    minutes = [row["elapsed_s"] / 60 for row in log]
    for axes, (key, name) in zip(all_axes, names.items(), strict=True):
        losses = [row[key] for row in log]
        around = [losses[max(0, i - 7) : i + 8] for i in range(len(losses))]
        axes.plot(minutes, losses, color="0.8", linewidth=0.8)
        axes.plot(minutes, [sum(some) / len(some) for some in around])
        axes.set_title(name)
        axes.set_xlabel("minutes")
        axes.set_ylim(bottom=0)
    _save(figure, path, log)


def plot_time_per_token(gpu: Results, cpu: dict[str, Any], path: Path) -> None:
    """Milliseconds per token by context: with a GPU at the left, without one at the right."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(11, 4.8))
    machine = gpu["decode"]["machine"]
    shape, model = gpu["decode"]["settings"]["shape"], cpu["settings"]["model"]
    _draw(left, _gpu_lines(gpu))
    left.set_title(f"{shape}, {machine['gpus'][0]}, {machine['cpus_usable']} host CPUs")
    _draw(right, _cpu_lines(cpu))
    right.set_title(f"{model}, {cpu['settings']['threads']} CPU threads")
    left.set_ylabel("ms per token, batch 1")
    _save(figure, path, _time_results(gpu, cpu))


def plot_tradeoff(result: dict[str, Any], path: Path) -> None:
    """Quality by milliseconds per token at the shortest and the longest context of each device."""
    rows = result["rows"]
    devices, lengths = devices_of(rows), sorted({row["length"] for row in rows})
    ends = list(dict.fromkeys((lengths[0], lengths[-1])))
    figure, all_axes = _pyplot().subplots(
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
    figure.tight_layout()  # as in `_save`: where labels have room depends on it
    for axes, curves in points:
        _label_policies(axes, curves)
    _save(figure, path, result)


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
        color = _POLICY_COLORS.get(policy, _INK)
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
            axes.axvline(milliseconds, color=_FAINT, linestyle=style)
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
            color=_FAINT,
            fontsize="small",
        )


def _label_policies(axes: Any, curves: dict[str, _Curve]) -> None:
    """A name near the point of each policy's largest budget."""
    to_points = 72 / axes.figure.dpi
    inside = _Box(*(to_points * edge for edge in axes.bbox.extents))
    at = {
        policy: [tuple(to_points * axes.transData.transform((x, y))) for _, x, y in curve]
        for policy, curve in curves.items()
    }
    taken = [_Box.around(x, y, 7, 7) for points in at.values() for x, y in points]
    for policy, points in sorted(at.items(), key=lambda item: -item[1][0][1]):
        largest = max(range(len(points)), key=lambda i: curves[policy][i][0] or 0)
        x, y = points[largest]
        box = _free_box(x, y, _CHARACTER_POINTS * len(policy), inside, taken)
        taken.append(box)
        dx, dy = (box.left + box.right) / 2 - x, (box.bottom + box.top) / 2 - y
        line = {"arrowstyle": "-", "color": _FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        is_far = math.hypot(max(0.0, abs(dx) - (box.right - box.left) / 2), dy) > _NEAR_POINTS
        label = axes.annotate(
            policy,
            curves[policy][largest][1:],
            (dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            color=_POLICY_COLORS.get(policy, _INK),
            fontsize="small",
            arrowprops=line if is_far else None,
        )
        label.set_in_layout(False)


def _free_box(x: float, y: float, width: float, inside: _Box, taken: Sequence[_Box]) -> _Box:
    """The nearest place for a name at a point that covers nothing; the one that covers least if
    there is none."""
    found, least = None, math.inf
    for distance in range(9, 100, 3):
        for angle in range(0, 360, 15):
            away_x, away_y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            centre_x = x + distance * away_x + width / 2 * max(-1, min(1, 2 * away_x))
            box = _Box.around(centre_x, y + distance * away_y, width, _LINE_POINTS)
            covered = sum(box.overlaps(other) for other in taken)
            covered += 0 if inside.contains(box) else len(taken)
            if covered < least:
                found, least = box, covered
        if least == 0:
            break
    assert found is not None
    return found


@dataclass(frozen=True)
class _Box:
    """A rectangle of a figure, in points."""

    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> _Box:
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def contains(self, other: _Box) -> bool:
        return (
            self.left <= other.left
            and self.bottom <= other.bottom
            and other.right <= self.right
            and other.top <= self.top
        )


def time_per_token_caption(gpu: Results, cpu: dict[str, Any] | None) -> str:
    """What the plot shows at its longest contexts, with machines and commits."""
    longest = max(decode_rows(gpu), key=lambda row: row["kv_len"])  # the first one is ours
    held = (
        f" Budget {gpu['decode']['settings']['budget_tokens']:,} tokens, other options at their "
        f"defaults. Of {format_bytes(longest['memory']['kv_host'])} of keys and values, "
        f"{engine_name(longest)} holds {format_bytes(longest['memory']['kv_device'])} on the GPU."
    )
    parts = [_caption("With a GPU", _gpu_lines(gpu), gpu["decode"], held)]
    if cpu is not None:
        said = (
            f" {LLAMA_CPP_NOTE} Budget {DEFAULT_BUDGET_TOKENS:,} tokens, other options at their "
            "defaults."
        )
        parts.append(_caption("Without", _cpu_lines(cpu), cpu, said))
    return "\n\n".join(parts)


def time_plot_is_current(gpu: Results, cpu: dict[str, Any], path: Path) -> bool:
    """Whether `path` is what `plot_time_per_token` would draw."""
    return is_current(path, _time_results(gpu, cpu))


def is_current(path: Path, results: Any) -> bool:
    """Whether the file was drawn from these results."""
    return path.is_file() and _digest(results) in path.read_text("utf-8")


def _gpu_lines(gpu: Results) -> _Lines:
    lines: _Lines = {}
    for engine in _GPU_ENGINES:
        for row in decode_rows(gpu):
            if row["engine"] == engine and row.get("policy") in (None, *_GPU_POLICIES):
                name = engine_name(row).replace("`", "")
                lines.setdefault(name, []).append(_point(row, "kv_len", "milliseconds"))
    return lines


def _cpu_lines(cpu: dict[str, Any]) -> _Lines:
    return {
        engine: [
            _point(row, "context", "step_ms") for row in cpu["rows"] if row["engine"] == engine
        ]
        for engine in _CPU_ENGINES
    }


def _point(row: Row, context: str, time: str) -> tuple[int, float, float, float]:
    return row[context], row[time], row[f"{time}_p10"], row[f"{time}_p90"]


def _draw(axes: Any, lines: _Lines) -> None:
    """Lines over two logarithmic axes; bars are from the 10th to the 90th percentile."""
    for name, points in lines.items():
        at, medians, low, high = zip(*sorted(points), strict=True)
        below = [median - p10 for median, p10 in zip(medians, low, strict=True)]
        above = [p90 - median for median, p90 in zip(medians, high, strict=True)]
        axes.errorbar(
            at,
            medians,
            yerr=[below, above],
            label=name,
            color=_color(name, list(lines)),
            marker="o",
            linewidth=2.5 if name.startswith("offload") else 1.5,
        )
    all_points = [point for points in lines.values() for point in points]
    contexts = sorted({point[0] for point in all_points})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xticks([], minor=True)
    times = [point[1] for point in all_points]
    least, most = min(times) / 2, max(times) * 2
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500, 1000) if least < tick < most]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("tokens of context")
    axes.legend(
        fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2
    )


def _caption(title: str, lines: _Lines, result: dict[str, Any], more: str = "") -> str:
    longest = max(point[0] for points in lines.values() for point in points)
    times = [
        f"{name} {point[1]:,.1f} ms"
        for name, points in lines.items()
        for point in points
        if point[0] == longest
    ]
    machine = result["machine"]
    gpus = [*machine["gpus"], f"{machine['cpu']}, {machine['cpus_usable']} CPUs"]
    changed = " with changes" if machine["uncommitted_changes"] else ""
    return (
        f"*{title}, at {longest:,} tokens: {'; '.join(times)}.{more} {', '.join(gpus)}; commit "
        f"{machine['commit'][:12]}{changed}, {machine['date']}.*"
    )


def _time_results(gpu: Results, cpu: dict[str, Any]) -> Any:
    return [decode_rows(gpu), gpu["decode"]["machine"], cpu]


def _digest(results: Any) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "offload"
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[name] = _INK
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path, results: Any) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Identifier": _digest(results)})
    _pyplot().close(figure)
    path.write_text(drawn.getvalue().replace("<defs>", f"<defs>\n{_dark_style()}", 1), "utf-8")


def _dark_style() -> str:
    """CSS that swaps colours where the reader prefers a dark page."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    ]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def _color(engine: str, engines: list[str]) -> tuple[float, ...]:
    """One hue per family of engines, lighter from its first member to its last."""
    from matplotlib import colormaps

    family = next((name for name in _HUES if engine.startswith(name)), engine)
    members = [other for other in engines if other.startswith(family)]
    shade = 0.65 - 0.3 * members.index(engine) / len(members)
    color: tuple[float, ...] = colormaps[_HUES.get(family, "Purples")](shade)
    return color
