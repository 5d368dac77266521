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

from perf.plots import (
    is_current,
    plot_decode,
    plot_time_per_token,
    time_per_token_caption,
    time_plot_is_current,
)
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
        return make(_gpu_results())

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
    "time-per-token": (
        "gpu-decode",
        _gpu(lambda gpu: time_per_token_caption(gpu, read_results("decode"))),
    ),
}
PLACEMENT_TARGETS = "gpu-placement-targets"  # of several files
NOT_MEASURED = "*Not measured yet: run `make bench`.*"
DECODE_PLOT = ROOT / "docs" / "decode.svg"
TIME_PLOT = ROOT / "docs" / "time-per-token.svg"
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


def _gpu_results() -> Results:
    """Of the parts of `perf.bench_gpu` that were measured."""
    of_part = {part: read_results(f"gpu-{part}") for part in PARTS}
    return {part: found for part, found in of_part.items() if found is not None}


def plots(*, outdated_only: bool) -> dict[Path, Callable[[], None]]:
    """What draws each plot whose results there are."""
    cpu, gpu = read_results("decode"), _gpu_results()
    found: dict[Path, Callable[[], None]] = {}
    if cpu is not None and not (outdated_only and is_current(DECODE_PLOT, cpu)):
        found[DECODE_PLOT] = lambda: plot_decode(cpu, DECODE_PLOT)
    if cpu is None or "decode" not in gpu:
        return found
    if not (outdated_only and time_plot_is_current(gpu, cpu, TIME_PLOT)):
        found[TIME_PLOT] = lambda: plot_time_per_token(gpu, cpu, TIME_PLOT)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    if parser.parse_args().check:
        paths = [*outdated(), *plots(outdated_only=True)]
        for path in paths:
            print(f"{path.relative_to(ROOT)} does not match perf/results; run: make report")
        sys.exit(1 if paths else 0)
    for path in outdated():
        path.write_text(render(path.read_text("utf-8")), "utf-8")
        print(path.relative_to(ROOT))
    for path, draw in plots(outdated_only=False).items():
        draw()
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
