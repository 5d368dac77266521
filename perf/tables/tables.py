"""Markdown of one results file each: the tables that README and docs show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from offload.bench.eval.output import markdown
from perf.tables.markdown import (
    FLOAT32_NOTE,
    LLAMA_CPP_NOTE,
    TIMES,
    Columns,
    Row,
    by_context,
    context_columns,
    known,
    policy_options_note,
    table,
)


def decode_table(result: dict[str, Any]) -> str:
    """Tokens per second of every engine at every context."""
    settings, rows = result["settings"], result["rows"]
    title = (
        f"{settings['model']}, batch 1, {settings['threads']} threads, decode tokens/s by context "
        "length; all engines read the same real text and take turns, medians over "
        f"{rows[0]['steps']} steps. {_weights_note(rows)} {policy_options_note()}"
        f"{_isa_note(settings)}"
    )
    speeds = context_columns(rows, known("decode_tokens_per_second", ".1f"), "context")
    by_engine = by_context(rows, lambda row: row["engine"], "context")
    parts = [title, table({"engine": "{name}", **speeds}, by_engine), _decode_ratios(rows)]
    return "\n\n".join([*parts, machine_line(result["machine"])])


def _weights_note(rows: Sequence[Row]) -> str:
    """What the engines of a run compute with."""
    has_float32 = any("float32" in row["engine"] for row in rows)
    return LLAMA_CPP_NOTE + f" {FLOAT32_NOTE}" * has_float32


def _isa_note(settings: dict[str, Any]) -> str:
    """That a run was held to an ISA, and what llama.cpp says that it was compiled for."""
    if settings.get("isa") is None:
        return ""
    builds = {engine["build"] for engine in settings["engines"].values() if "build" in engine}
    features = [", ".join(re.findall(r"(\w+) = 1", build)) for build in sorted(builds)]
    compiled = "".join(f"; llama.cpp is compiled with {names}" for names in features)
    return f" Every engine is held to {settings['isa']}{compiled}."


def _speeds(rows: Sequence[Row], key: str) -> dict[int, dict[str, float]]:
    """By context and engine."""
    speeds: dict[int, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        speeds.setdefault(row["context"], {})[row["engine"]] = row[key]
    return speeds


def _over_fastest(ours: float, speeds: dict[str, float], family: str) -> str:
    """How many times as fast as the fastest engine of a family; empty without one."""
    of_family = [speed for name, speed in speeds.items() if name.startswith(family)]
    return f"{ours / max(of_family):.2f}{TIMES}" if of_family else ""


def _decode_ratios(rows: Sequence[Row]) -> str:
    """Ours over the others of one run."""
    engines = {row["engine"] for row in rows}
    mine = next(x for x in ("exact_topk", "full") if f"offload {x}" in engines)
    columns = (
        f"`{mine}` at context",
        "vs transformers' defaults",
        "vs its fastest setting here",
        "vs llama.cpp's fastest, Q4_1",
    )
    lines = []
    for context, speeds in _speeds(rows, "decode_tokens_per_second").items():
        ours = speeds[f"offload {mine}"]
        cells = [f"{context:,}", f"{ours / speeds['transformers']:.1f}{TIMES}"]
        cells += [_over_fastest(ours, speeds, family) for family in ("transformers", "llama.cpp")]
        lines.append(cells)
    return markdown(columns, lines)


def prefill_table(result: dict[str, Any]) -> str:
    """Tokens per second of prefill, from the same run as `decode_table`; one measurement each."""
    rows = result["rows"]
    same: dict[str, float] = {}
    for row in rows:
        agreed = row["same_next_token_as_transformers"]
        same[row["engine"]] = min(agreed, same.get(row["engine"], agreed))
    title = (
        "Prefill tokens/s by prompt length in that run (medians of three up to 2,048 tokens, one "
        "beyond), and at how many of the decoded positions the most likely next token was that of "
        f"transformers bf16 (the lowest of the contexts). {_weights_note(rows)}"
    )
    columns: Columns = {
        "engine": "{name}",
        **context_columns(rows, known("prefill_tokens_per_second", ",.0f"), "context"),
        "same next token": lambda of_engine: f"{same[of_engine['name']]:.0%}",
    }
    by_engine = by_context(rows, lambda row: row["engine"], "context")
    return "\n\n".join([title, table(columns, by_engine), _prefill_ratios(rows)])


def _prefill_ratios(rows: Sequence[Row]) -> str:
    """Ours over the others of one run."""
    others = {
        "vs transformers' fastest": "transformers",
        "vs llama.cpp's fastest, Q4_1": "llama.cpp",
        "vs itself in float32": "offload full, float32",
    }
    others = {
        title: family
        for title, family in others.items()
        if any(row["engine"].startswith(family) for row in rows)
    }
    lines = [
        [f"{n:,}", *(_over_fastest(at["offload full"], at, family) for family in others.values())]
        for n, at in _speeds(rows, "prefill_tokens_per_second").items()
    ]
    return markdown(["`full` at prompt length", *others], lines)


def policy_speed_table(result: dict[str, Any]) -> str:
    """Decode tokens/s of a whole model under each policy, compared with exact top-k."""
    rows = [
        row | {"policy": row["engine"].removeprefix("offload ")}
        for row in result["rows"]
        if row["engine"].startswith("offload ")
    ]
    rows.sort(key=lambda row: -row["decode_tokens_per_second"])
    speeds = {row["policy"]: row["decode_tokens_per_second"] for row in rows}

    contexts = ", ".join(f"{c:,}" for c in sorted({row["context"] for row in rows}))
    title = (
        f"{result['settings']['model']} at {contexts} tokens, all engines in turns on the same "
        f"text. {policy_options_note()}"
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "tokens/s": "{decode_tokens_per_second:.1f}",
        "of exact_topk": lambda row: f"{speeds[row['policy']] / speeds['exact_topk']:.0%}",
    }
    return "\n\n".join([title, table(columns, rows), machine_line(result["machine"])])


def machine_line(machine: dict[str, Any], *, spreads: bool = True) -> str:
    """Where and when it was measured.

    Args:
        spreads: say what the table's ± are.
    """
    versions = machine["versions"]
    commit = machine["commit"][:12] + (" with changes" if machine["uncommitted_changes"] else "")
    isa = machine["isa"] + (" (forced)" if machine.get("isa_forced") else "")
    load = ""
    if "load_average" in machine:  # `offload eval` does not tell it
        load = f", load {machine['load_average']:.1f} at the start"
    return (
        f"*{machine['cpu']}, {machine['cpus_usable']} of {machine['cpus_present']} CPUs, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, ISA {isa}, "
        f"{', '.join(machine['gpus']) or 'no GPU'}; Python {versions['python']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}; commit {commit}, "
        f"{machine['date']}{load}."
        f"{' ±: half of the 10th to 90th percentile.' * spreads}*"
    )
