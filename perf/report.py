"""Write the tables of README.md and docs/ from perf/results: `python -m perf.report`.

A table stands between `<!-- perf:NAME -->` and `<!-- /perf:NAME -->`. With --check nothing is
written, and the exit code is 1 if a file would change. Tables of a GPU are empty until one was
measured: few machines have one. The table that `auto` chooses by,
offload/planning/measured_loss.json, is written from there, too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from offload.planning import measured_loss
from perf import results_file
from perf.plots import (
    is_current,
    plot_rooms,
    plot_time_per_token,
    time_per_token_caption,
    time_results,
)
from perf.results_file import ROOT, read_results
from perf.tables import (
    comparison_table,
    gpu_tables,
    loss_tables,
    tables,
    tradeoff_tables,
)
from perf.tables.gpu_tables import Results
from perf.tradeoff_plot import plot_tradeoff

GPU_PARTS = ("decode", "peers", "prefill")


def _gpu_results() -> Results:
    """Results of the parts of `perf.bench_gpu` that were measured."""
    of_part = {part: read_results(f"gpu-{part}") for part in GPU_PARTS}
    return {part: found for part, found in of_part.items() if found is not None}


def _hard_results() -> Results:
    """Results of `offload eval ruler --tasks hard`."""
    names = sorted(path.stem for path in results_file.RESULTS.glob("hard-ruler*.json"))
    return {name: found for name in names if (found := read_results(name)) is not None}


# Section name -> (results file, what makes its Markdown).
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "decode": ("decode", tables.decode_table),
    "policy-speed": ("decode-policies", tables.policy_speed_table),
    "prefill": ("decode", tables.prefill_table),
    "decode-avx2": ("decode-avx2", tables.decode_table),
    "prefill-avx2": ("decode-avx2", tables.prefill_table),
    "decode-q4": ("decode-q4", tables.decode_table),
    "prefill-q4": ("decode-q4", tables.prefill_table),
    "decode-q4-avx2": ("decode-q4-avx2", tables.decode_table),
    "prefill-q4-avx2": ("decode-q4-avx2", tables.prefill_table),
    "measured-loss": ("hard-ruler-found", lambda _: loss_tables.loss_table(_hard_results())),
    "tradeoff": ("tradeoff", tradeoff_tables.tradeoff_table),
    "tradeoff-in-short": (
        "tradeoff",
        lambda result: tradeoff_tables.in_short_table(result, read_results("latency")),
    ),
    "tradeoff-options": ("tradeoff", tradeoff_tables.options_table),
    "comparison-one": ("comparison", comparison_table.one_client_table),
    "comparison-many": ("comparison", comparison_table.many_table),
    "comparison-limit": ("comparison", comparison_table.limit_table),
    "comparison-avx2": ("comparison-avx2", comparison_table.all_tables),
    "comparison-amx": ("comparison-amx", comparison_table.all_tables),
    "comparison-gpu": ("comparison-gpu", comparison_table.gpu_table),
    "gpu-decode": ("gpu-decode", lambda _: gpu_tables.gpu_decode_table(_gpu_results())),
    "gpu-overlap": ("gpu-decode", lambda _: gpu_tables.gpu_overlap_table(_gpu_results())),
    "gpu-prefill": ("gpu-prefill", lambda _: gpu_tables.gpu_prefill_table(_gpu_results())),
    "time-per-token": (
        "gpu-decode",
        lambda _: time_per_token_caption(_gpu_results(), read_results("decode")),
    ),
}
EMPTY_SECTIONS = ("gpu-decode", "gpu-overlap", "gpu-prefill")  # where there was no GPU
NOT_MEASURED = comparison_table.NOT_MEASURED
DOCS = ROOT / "docs"
TIME_PLOT = DOCS / "time-per-token.svg"
ROOMS_PLOT = DOCS / "rooms.svg"
TRADEOFF_PLOT = DOCS / "tradeoff.svg"
_SECTION = re.compile(r"<!-- perf:(?P<name>[\w-]+) -->\n.*?<!-- /perf:(?P=name) -->", re.DOTALL)
_RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)")


def documents() -> list[Path]:
    """Files that may have sections."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def render(text: str, folder: Path = DOCS) -> str:
    """`text` with its sections replaced by what perf/results says.

    Args:
        folder: where the text's file is. Links of a section are relative to docs/, and are changed
            to lead to the same pages from there.

    Raises:
        ValueError: a section that does not exist.
    """

    to_docs = os.path.relpath(DOCS, folder)

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        content = _content(name)
        if to_docs != ".":
            content = _RELATIVE_LINK.sub(f"]({to_docs}/", content)
        return f"<!-- perf:{name} -->\n{content}\n<!-- /perf:{name} -->"

    return _SECTION.sub(replace, text)


def _content(name: str) -> str:
    """The Markdown of a section, or what stands there while nothing was measured."""
    if name not in SECTIONS:
        raise ValueError(f"unknown section {name!r}; available: {', '.join(SECTIONS)}")
    results_name, make = SECTIONS[name]
    result = read_results(results_name)
    if result is None:
        return "" if name in EMPTY_SECTIONS else NOT_MEASURED
    return make(result)


def outdated() -> list[Path]:
    """Documents whose sections differ from perf/results, and the package's table if it does."""
    paths = [*documents(), measured_loss.PACKAGED]
    return [x for x in paths if not x.exists() or _rendered(x) != x.read_text("utf-8")]


def _rendered(path: Path) -> str:
    if path == measured_loss.PACKAGED:
        return loss_tables.packaged_losses(_hard_results())
    return render(path.read_text("utf-8"), path.parent)


def plots(*, outdated_only: bool) -> dict[Path, Callable[[], None]]:
    """What draws each plot whose results there are."""
    cpu, gpu = read_results("decode"), _gpu_results()
    found: dict[Path, Callable[[], None]] = {}
    for name, path, draw in (
        ("gpu-rooms", ROOMS_PLOT, plot_rooms),
        ("tradeoff", TRADEOFF_PLOT, plot_tradeoff),
    ):
        result = read_results(name)
        if result is not None and not (outdated_only and is_current(path, result)):
            found[path] = partial(draw, result, path)
    if cpu is None or "decode" not in gpu:
        return found
    if not (outdated_only and is_current(TIME_PLOT, time_results(gpu, cpu))):
        found[TIME_PLOT] = partial(plot_time_per_token, gpu, cpu, TIME_PLOT)
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
        path.write_text(_rendered(path), "utf-8")
        print(path.relative_to(ROOT))
    for path, draw in plots(outdated_only=False).items():
        draw()
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
