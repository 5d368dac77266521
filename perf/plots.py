"""Plots of README and docs, drawn from perf/results by `perf.report`.

The same results give the same file. A file holds a digest of the results it shows, so that
`is_current` needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from offload.bench.decode.engines import GRAPH, OURS, STOCK_COMPILED, STOCK_OFFLOADED
from offload.system.memory import format_bytes
from perf.tables.gpu_tables import Results, decode_rows, engine_name, peers_note
from perf.tables.markdown import DEFAULT_BUDGET_TOKENS, LLAMA_CPP_NOTE, Row

_HUES = {"offload": "Blues", "transformers": "Greys", "llama.cpp": "Oranges", GRAPH: "Greens"}
_GPU_ENGINES = (STOCK_OFFLOADED, STOCK_COMPILED, GRAPH, OURS)
_GPU_POLICIES = ("tidal_decode", "lychee_cluster", "lfps")
_CPU_ENGINES = (
    *("transformers", "transformers, static cache", "llama.cpp", "llama.cpp, flash attention"),
    *("offload full", "offload exact_topk"),
)


# Colours of text, of what matters less and of the background, on a light page and a dark one.
INK, FAINT, _PAPER = "#1f2328", "#818b98", "#ffffff"
_DARK = {INK: "#e6edf3", FAINT: "#848d97", _PAPER: "#0d1117"}

# By engine: (context, median, 10th and 90th percentile of the milliseconds per token) each.
_Lines = dict[str, list[tuple[int, float, float, float]]]


def plot_time_per_token(gpu: Results, cpu: dict[str, Any], path: Path) -> None:
    """Milliseconds per token by context: with a GPU at the left, without one at the right."""
    figure, (left, right) = load_pyplot().subplots(1, 2, figsize=(11, 4.8))
    machine = gpu["decode"]["machine"]
    shape, model = gpu["decode"]["settings"]["shape"], cpu["settings"]["model"]
    _draw(left, _gpu_lines(gpu))
    left.set_title(f"{shape}, {machine['gpus'][0]}, {machine['cpus_usable']} host CPUs")
    _draw(right, _cpu_lines(cpu))
    right.set_title(f"{model}, {cpu['settings']['threads']} CPU threads")
    left.set_ylabel("ms per token, batch 1")
    save_plot(figure, path, time_results(gpu, cpu))


def plot_rooms(result: dict[str, Any], path: Path) -> None:
    """Milliseconds per token by the GPU's memory, and how many KV heads that holds."""
    figure, axes = load_pyplot().subplots(figsize=(8, 3.6))
    rows = result["rows"]
    names = dict.fromkeys(row["policy"] for row in rows if "room_gib" in row)
    for policy, above in zip(names, (-14, 6), strict=False):
        of_policy = [row for row in rows if row["policy"] == policy]
        at, times = ([row[key] for row in of_policy] for key in ("room_gib", "milliseconds"))
        (line,) = axes.plot(at, times, marker="o", label=policy)
        predicted = [row["predicted_milliseconds"] for row in of_policy]
        axes.plot(at, predicted, "--", color=line.get_color(), label=f"{policy}, predicted")
        for row in of_policy:
            place = (row["room_gib"], row["milliseconds"])
            text = f"{row['heads']['GPU']}"
            axes.annotate(text, place, (0, above), textcoords="offset points", fontsize="small")
    for row in rows:
        if row.get("engine") == GRAPH:
            axes.axhline(row["milliseconds"], color="0.5", linestyle=":", label=GRAPH)
    axes.set_yscale("log")
    axes.set_yticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("GiB of the GPU, weights included")
    axes.set_ylabel("ms per token")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    save_plot(figure, path, result)


def time_per_token_caption(gpu: Results, cpu: dict[str, Any] | None) -> str:
    """What the plot shows at its longest contexts, with machines and commits."""
    longest = max(decode_rows(gpu), key=lambda row: row["kv_len"])  # the first one is ours
    held = (
        f" Budget {gpu['decode']['settings']['budget_tokens']:,} tokens, other options at their "
        f"defaults. Of {format_bytes(longest['memory']['kv_host'])} of keys and values, "
        f"{engine_name(longest)} holds {format_bytes(longest['memory']['kv_device'])} on the GPU."
        f"{peers_note(gpu)}"
    )
    parts = [_caption("With a GPU", _gpu_lines(gpu), gpu["decode"], held)]
    if cpu is not None:
        said = (
            f" {LLAMA_CPP_NOTE} Budget {DEFAULT_BUDGET_TOKENS:,} tokens, other options at their "
            "defaults."
        )
        parts.append(_caption("Without", _cpu_lines(cpu), cpu, said))
    return "\n\n".join(parts)


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


def time_results(gpu: Results, cpu: dict[str, Any]) -> Any:
    """What `plot_time_per_token` shows."""
    return [decode_rows(gpu), gpu["decode"]["machine"], cpu]


def _digest(results: Any) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def load_pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "offload"
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[name] = INK
    from matplotlib import pyplot

    return pyplot


def save_plot(figure: Any, path: Path, results: Any) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    drawn = io.StringIO()
    metadata = {"Date": None, "Identifier": _digest(results)}
    figure.savefig(drawn, format="svg", bbox_inches="tight", metadata=metadata)
    load_pyplot().close(figure)
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
