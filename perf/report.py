"""Write the tables of README.md and docs/ from perf/results: `python -m perf.report`.

A table stands between `<!-- perf:NAME -->` and `<!-- /perf:NAME -->`. With --check nothing is
written, and the exit code is 1 if a file would change. Tables of a GPU are empty until one was
measured: few machines have one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.loading.gguf import LONG_CONTEXT_ADAPTER
from perf.plots import (
    is_current,
    plot_decode,
    plot_time_per_token,
    plot_tradeoff,
    plot_training,
    time_per_token_caption,
    time_plot_is_current,
)
from perf.results_file import ROOT, read_results
from perf.tables import (
    calibration_tables,
    cascade_tables,
    correction_tables,
    gpu_tables,
    hard_kv_tables,
    latency_tables,
    long_context_tables,
    lychee_cluster_tables,
    paper_lfps_tables,
    placement_tables,
    selection_tables,
    shared_selection_tables,
    tables,
    tradeoff_tables,
)
from perf.tables.gpu_tables import Results
from perf.tables.placement_targets import gpu_placement_targets_table

LYCHEE_CLUSTER = "paper-lychee-cluster"
# Section name -> (results file, what makes its Markdown).
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "attention": ("attention", tables.attention_table),
    "decode": ("decode", tables.decode_table),
    "decode-plot": ("decode", tables.decode_plot),
    "policy-speed": ("decode-policies", selection_tables.policy_speed_table),
    "paper-lfps-ablation": ("paper-lfps", paper_lfps_tables.paper_lfps_ablation_table),
    "paper-lfps-batch": ("paper-lfps-speed", paper_lfps_tables.paper_lfps_batch_table),
    "paper-lfps-bypass": (
        "paper-lfps",
        lambda result: paper_lfps_tables.paper_lfps_bypass_table(
            result, read_results("paper-lfps-speed")
        ),
    ),
    "paper-lfps-context": ("latency", paper_lfps_tables.paper_lfps_context_table),
    "paper-lfps-overlap": ("paper-lfps", paper_lfps_tables.paper_lfps_overlap_table),
    "paper-lfps-steps": ("paper-lfps", paper_lfps_tables.paper_lfps_steps_table),
    "tidal-needle": ("tidal-needle", shared_selection_tables.needle_table),
    "prefill": ("decode", tables.prefill_table),
    "gpu-plan": ("gpu-plan", placement_tables.gpu_plan_table),
    "latency": ("latency", latency_tables.latency_table),
    "latency-phases": ("latency", latency_tables.latency_phases_table),
    "latency-targets": ("latency", latency_tables.latency_targets_table),
    "latency-16-cores": ("latency-16-cores", latency_tables.latency_table),
    "latency-16-cores-targets": ("latency-16-cores", latency_tables.latency_targets_table),
    "lfps-ablation": ("lfps-ablation", selection_tables.lfps_ablation_table),
    "lfps-candidates": ("paper-lfps-candidates", selection_tables.lfps_candidates_table),
    "long-context": ("long-context", long_context_tables.long_context_table),
    "lychee-cluster-answers": (LYCHEE_CLUSTER, lychee_cluster_tables.answers_table),
    "lychee-cluster-budget": (LYCHEE_CLUSTER, lychee_cluster_tables.budget_table),
    "lychee-cluster-chunks": (LYCHEE_CLUSTER, lychee_cluster_tables.chunks_table),
    "lychee-cluster-granularity": (LYCHEE_CLUSTER, lychee_cluster_tables.granularity_table),
    "lychee-cluster-pooling": (LYCHEE_CLUSTER, lychee_cluster_tables.pooling_table),
    "lychee-cluster-stability": (LYCHEE_CLUSTER, lychee_cluster_tables.stability_table),
    "paper-calibration": ("paper-calibration", calibration_tables.calibration_table),
    "paper-calibration-steps": ("paper-calibration", calibration_tables.steps_table),
    "paper-cascade": ("paper-cascade", cascade_tables.cascade_table),
    "paper-cascade-long": ("paper-cascade-long", cascade_tables.long_generation_table),
    "paper-correction": ("paper-correction", correction_tables.correction_table),
    "paper-correction-time": ("paper-correction-time", correction_tables.time_table),
    "paper-correction-time-gpu": ("paper-correction-time-gpu", correction_tables.time_table),
    "paper-hard-kv": ("paper-hard-kv", hard_kv_tables.hard_kv_table),
    "paper-lychee-decode-roles": (
        "paper-lychee-decode-roles",
        shared_selection_tables.roles_table,
    ),
    "paper-lychee-decode-rules": (
        "paper-lychee-decode-rules",
        shared_selection_tables.rules_table,
    ),
    "paper-lychee-rules": ("paper-lychee-rules", shared_selection_tables.equal_rules_table),
    "paper-tidal-decode": ("paper-tidal-decode", shared_selection_tables.layer_sweep_table),
    "paper-tidal-decode-choice": (
        "paper-tidal-decode",
        shared_selection_tables.layer_choice_table,
    ),
    "paper-tidal-decode-lengths": (
        "paper-tidal-decode",
        shared_selection_tables.layer_lengths_table,
    ),
    "paper-tidal-decode-sets": ("paper-tidal-decode", shared_selection_tables.layer_sets_table),
    "ruler": ("ruler", long_context_tables.ruler_table),
    "ruler-ablation": ("ruler-ablation", long_context_tables.ruler_ablation_table),
    "selection": ("selection", selection_tables.selection_table),
    "startup": ("startup", tables.startup_table),
    "tradeoff": ("tradeoff", tradeoff_tables.tradeoff_table),
    "tradeoff-options": ("tradeoff", tradeoff_tables.options_table),
}
# Of several parts of `perf.bench_gpu`, which write a file each: (the one that must be there, …).
GPU_SECTIONS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "gpu-batch": ("batch", gpu_tables.gpu_batch_table),
    "gpu-decode": ("decode", gpu_tables.gpu_decode_table),
    "gpu-overlap": ("decode", gpu_tables.gpu_overlap_table),
    "gpu-prefill": ("prefill", gpu_tables.gpu_prefill_table),
    "gpu-targets": ("decode", gpu_tables.gpu_targets_table),
    "time-per-token": (
        "decode",
        lambda gpu: time_per_token_caption(gpu, read_results("decode")),
    ),
}
PLACEMENT_TARGETS = "gpu-placement-targets"  # of several files
NOT_MEASURED = "*Not measured yet: run `make bench`.*"
OWN_SCRIPTS = {
    "gpu-plan": "perf.bench_plan",
    "tradeoff": "perf.bench_tradeoff",
    "paper-lychee-rules": "perf.papers.lychee_rules",
}
DECODE_PLOT = ROOT / "docs" / "decode.svg"
TIME_PLOT = ROOT / "docs" / "time-per-token.svg"
TRAINING_PLOT = ROOT / "docs" / "long-context-training.svg"
TRADEOFF_PLOT = ROOT / "docs" / "tradeoff.svg"
TRAINING_LOG = LONG_CONTEXT_ADAPTER / "log.json"
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
        return f"<!-- perf:{name} -->\n{_content(name)}\n<!-- /perf:{name} -->"

    return _SECTION.sub(replace, text)


def _content(name: str) -> str:
    """The Markdown of a section, or what stands there while nothing was measured."""
    if name == PLACEMENT_TARGETS:
        return placement_targets()
    if name in GPU_SECTIONS:
        part, make_gpu = GPU_SECTIONS[name]
        results = _gpu_results()
        if part in results:
            return make_gpu(results)
        return "" if name.startswith("gpu-") else NOT_MEASURED
    if name not in SECTIONS:
        available = ", ".join([*SECTIONS, *GPU_SECTIONS, PLACEMENT_TARGETS])
        raise ValueError(f"unknown section {name!r}; available: {available}")
    results_name, make = SECTIONS[name]
    result = read_results(results_name)
    if result is not None:
        return make(result)
    if results_name in OWN_SCRIPTS:
        return f"*Not measured yet: run `python -m {OWN_SCRIPTS[results_name]}`.*"
    return NOT_MEASURED


def placement_targets() -> str:
    """Of the files that there are, which may be none."""
    names = ("gpu-heads", "gpu-plan", "gpu-retrieval", "gpu-tp")
    found = {name: read_results(name) for name in names}
    return gpu_placement_targets_table({name: x for name, x in found.items() if x is not None})


def outdated() -> list[Path]:
    """Documents whose sections differ from perf/results."""
    return [
        path for path in documents() if render(path.read_text("utf-8")) != path.read_text("utf-8")
    ]


def _gpu_results() -> Results:
    """Of the parts of `perf.bench_gpu` that were measured."""
    of_part = {part: read_results(f"gpu-{part}") for part in gpu_tables.PARTS}
    return {part: found for part, found in of_part.items() if found is not None}


def plots(*, outdated_only: bool) -> dict[Path, Callable[[], None]]:
    """What draws each plot whose results there are."""
    cpu, gpu = read_results("decode"), _gpu_results()
    found: dict[Path, Callable[[], None]] = {}
    log = json.loads(TRAINING_LOG.read_text("utf-8"))
    if not (outdated_only and is_current(TRAINING_PLOT, log)):
        found[TRAINING_PLOT] = lambda: plot_training(log, TRAINING_PLOT)
    if cpu is not None and not (outdated_only and is_current(DECODE_PLOT, cpu)):
        found[DECODE_PLOT] = lambda: plot_decode(cpu, DECODE_PLOT)
    tradeoff = read_results("tradeoff")
    if tradeoff is not None and not (outdated_only and is_current(TRADEOFF_PLOT, tradeoff)):
        found[TRADEOFF_PLOT] = lambda: plot_tradeoff(tradeoff, TRADEOFF_PLOT)
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
