"""Write the tables of README.md and docs/ from perf/results: `python -m perf.report`.

A table stands between `<!-- perf:NAME -->` and `<!-- /perf:NAME -->`. With --check nothing is
written, and the exit code is 1 if a file would change. Tables of a GPU are empty until one was
measured: few machines have one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf.results_file import ROOT, read_results
from perf.tables.gpu_tables import (
    PARTS,
    Results,
    gpu_batch_table,
    gpu_decode_table,
    gpu_overlap_table,
    gpu_prefill_table,
    gpu_targets_table,
)
from perf.tables.latency_tables import latency_phases_table, latency_table, latency_targets_table
from perf.tables.placement_tables import (
    COMMANDS,
    gpu_gather_table,
    gpu_heads_table,
    gpu_hybrid_table,
    gpu_plan_table,
    gpu_retrieval_table,
    gpu_tp_table,
    not_measured,
)
from perf.tables.placement_targets import gpu_placement_targets_table
from perf.tables.selection_tables import (
    lfps_candidates_table,
    niah_table,
    policy_speed_table,
    selection_table,
)
from perf.tables.tables import (
    attention_table,
    decode_plot,
    decode_table,
    prefill_table,
    startup_table,
)


def _gpu(make: Callable[[Results], str]) -> Callable[[dict[str, Any]], str]:
    """For a table of several parts of `perf.bench_gpu`, which write a file each."""

    def table(result: dict[str, Any]) -> str:
        of_part = {part: read_results(f"gpu-{part}") for part in PARTS}
        return make({part: found for part, found in of_part.items() if found is not None})

    return table


def placement_targets() -> str:
    """Of the files that there are, which may be none."""
    found = {name: read_results(name) for name in COMMANDS}
    return gpu_placement_targets_table({name: x for name, x in found.items() if x is not None})


# Section name -> (results file, what makes its Markdown).
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "attention": ("attention", attention_table),
    "decode": ("decode", decode_table),
    "decode-plot": ("decode", decode_plot),
    "policy-speed": ("decode-policies", policy_speed_table),
    "prefill": ("decode", prefill_table),
    "gpu-batch": ("gpu-batch", _gpu(gpu_batch_table)),
    "gpu-decode": ("gpu-decode", _gpu(gpu_decode_table)),
    "gpu-overlap": ("gpu-decode", _gpu(gpu_overlap_table)),
    "gpu-gather": ("gpu-gather", gpu_gather_table),
    "gpu-heads": ("gpu-heads", gpu_heads_table),
    "gpu-hybrid": ("gpu-hybrid", gpu_hybrid_table),
    "gpu-plan": ("gpu-plan", gpu_plan_table),
    "gpu-prefill": ("gpu-prefill", _gpu(gpu_prefill_table)),
    "gpu-retrieval": ("gpu-retrieval", gpu_retrieval_table),
    "gpu-targets": ("gpu-decode", _gpu(gpu_targets_table)),
    "gpu-tp": ("gpu-tp", gpu_tp_table),
    "latency": ("latency", latency_table),
    "latency-phases": ("latency", latency_phases_table),
    "latency-targets": ("latency", latency_targets_table),
    "latency-16-cores": ("latency-16-cores", latency_table),
    "latency-16-cores-phases": ("latency-16-cores", latency_phases_table),
    "latency-16-cores-targets": ("latency-16-cores", latency_targets_table),
    "lfps-candidates": ("selection", lfps_candidates_table),
    "niah": ("niah", niah_table),
    "selection": ("selection", selection_table),
    "startup": ("startup", startup_table),
}
PLACEMENT_TARGETS = "gpu-placement-targets"  # of several files
NOT_MEASURED = "*Not measured yet: run `make bench`.*"
PLOT = ROOT / "docs" / "decode.svg"
_HUES = {"offload": "Blues", "transformers": "Greys", "llama.cpp": "Oranges"}
_SECTION = re.compile(r"<!-- perf:(?P<name>[\w-]+) -->\n.*?<!-- /perf:(?P=name) -->", re.DOTALL)


def documents() -> list[Path]:
    """Files that may have sections."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def render(text: str) -> str:
    """`text` with its sections replaced by what perf/results says.

    Raises:
        ValueError: a section that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        content = placement_targets() if name == PLACEMENT_TARGETS else _content(name)
        return f"<!-- perf:{name} -->\n{content}\n<!-- /perf:{name} -->"

    return _SECTION.sub(replace, text)


def _content(name: str) -> str:
    """The Markdown of a section, or what stands there while nothing was measured."""
    if name not in SECTIONS:
        available = ", ".join([*SECTIONS, PLACEMENT_TARGETS])
        raise ValueError(f"unknown section {name!r}; available: {available}")
    results_name, make = SECTIONS[name]
    result = read_results(results_name)
    if result is not None:
        return make(result)
    if results_name in COMMANDS:
        return not_measured(results_name)
    return "" if name.startswith("gpu-") else NOT_MEASURED


def outdated() -> list[Path]:
    """Documents whose sections differ from perf/results."""
    return [
        path for path in documents() if render(path.read_text("utf-8")) != path.read_text("utf-8")
    ]


def plot_decode(result: dict[str, Any], path: Path) -> None:
    """Decode speed by context length, as an SVG that is the same for the same results."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "offload"
    from matplotlib import pyplot

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
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _color(engine: str, engines: list[str]) -> tuple[float, ...]:
    """One hue per family of engines, lighter from its first member to its last."""
    from matplotlib import colormaps

    family = re.match(r"[\w.]+", engine)
    name = family[0] if family else engine
    members = [other for other in engines if other.startswith(name)]
    shade = 0.75 - 0.4 * members.index(engine) / len(members)
    color: tuple[float, ...] = colormaps[_HUES.get(name, "Greens")](shade)
    return color


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    if parser.parse_args().check:
        paths = outdated()
        for path in paths:
            print(f"{path.relative_to(ROOT)} does not match perf/results; run: make report")
        sys.exit(1 if paths else 0)
    for path in outdated():
        path.write_text(render(path.read_text("utf-8")), "utf-8")
        print(path.relative_to(ROOT))
    decode = read_results("decode")
    if decode is not None:
        plot_decode(decode, PLOT)
        print(PLOT.relative_to(ROOT))


if __name__ == "__main__":
    main()
