"""Markdown of what placements, their kernels, plans and two GPUs were measured to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.decode.gpu.placement import LETTERS, Place
from offload.system.memory import format_bytes
from perf.tables.gpu_tables import (
    engine_name,
    gpu_machine_line,
    gpu_section,
    milliseconds_cell,
)
from perf.tables.markdown import (
    TIMES,
    Columns,
    Row,
    by_context,
    context_columns,
    policy_options_note,
    table,
)

# Results file -> what measures it.
COMMANDS = {"gpu-plan": "perf.bench_plan", "gpu-tp": "perf.bench_tp"}
_COUNTED = ("kv_device", "device", "host")  # bytes of a plan that were counted, too


def not_measured(results_name: str) -> str:
    """What stands in place of a table."""
    command = COMMANDS[results_name]
    return f"*Not measured yet: run `python -m {command}` on a machine with a GPU.*"


def gpu_plan_table(result: dict[str, Any]) -> str:
    """Predicted beside measured steps, planned beside taken bytes."""

    def heads_cell(row: Row) -> str:
        places = (Place.GPU, Place.GATHER, Place.CODES, Place.CPU)
        counts = {place: row["heads"].get(place.name) for place in places}
        return " ".join(f"{LETTERS[place]} {n}" for place, n in counts.items() if n is not None)

    def bytes_cell(row: Row) -> str:
        errors = bytes_errors(row).values()
        return f"{max(errors, key=abs):+.1%}" if errors else ""

    settings = result["settings"]
    title = (
        f"Steps of {settings['shape']}, {settings['dtype']}, batch 1, predicted from the machine's "
        "profile, and measured; with the placement that `offload plan` chooses, and with dense "
        "layers only. KV heads: G on the GPU, g gathered, . on the CPU. Bytes: of KV on the GPU, "
        "of all beside the weights there, and of KV on the host, the count that is off most. "
        "Options but the budget are the defaults; [results](results.md) judge them with 1,024 "
        "tokens and a model of 135M parameters."
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "tokens": "{kv_len:,}",
        "budget": "{budget_tokens:,}",
        "threads": "{threads}",
        "KV heads": heads_cell,
        "predicted ms": "{predicted_milliseconds:.2f}",
        "measured ms": milliseconds_cell,
        "off by": "{error:+.1%}",
        "bytes off by": bytes_cell,
    }
    return gpu_section(result, title, columns, result["rows"])


def text_plan_table(result: dict[str, Any]) -> str:
    """What the commands predict and measure of one model, engine by engine."""
    settings, rows = result["settings"], result["rows"]
    where = "with a GPU" if settings["device"] != "cpu" else "CPU only"
    title = (
        f"{settings['model']}, {settings['dtype']}, batch 1, {where}, {settings['threads']} "
        "threads, real text: milliseconds per token that `offload plan` predicts, and that "
        f"`offload bench decode` measures; budget {settings['budget_tokens']:,}."
    )
    columns: dict[str, str | Callable[[Any], str]] = {"engine": "{name}"}
    cells: dict[str, Callable[[Row], str]] = {
        "predicted": lambda row: f"{row['predicted_milliseconds']:.2f}" if "error" in row else "",
        "measured": lambda row: milliseconds_cell(row) if row["milliseconds"] else "",
        "off by": lambda row: f"{row['error']:+.0%}" if "error" in row else "",
    }
    found = {name: context_columns(rows, cell) for name, cell in cells.items()}
    for context in found["measured"]:
        columns |= {f"{context}: {name}": of_all[context] for name, of_all in found.items()}
    return gpu_section(result, title, columns, by_context(rows, engine_name))


def bytes_errors(row: Row) -> dict[str, float]:
    """Of planned bytes against taken ones, of what was counted of both."""
    found = {}
    for name in _COUNTED:
        planned, taken = row[f"planned_{name}_bytes"], row[f"{name}_bytes"]
        if planned and taken:
            found[name] = planned / taken - 1
    return found


def gpu_tp_table(result: dict[str, Any]) -> str:
    """Tokens/s of a batch on one GPU and on two."""
    rows, settings = result["rows"], result["settings"]
    ratios = (f"`{name}` {ratio:.2f}{TIMES}" for name, ratio in two_gpu_ratios(result).items())
    said = [
        f"Two GPUs against one, each in as many parts as are faster: {', '.join(ratios)}.",
        *(
            f"An all-reduce of {row['bytes']:,} bytes takes {row['microseconds']:.1f} µs in a "
            "graph."
            for row in rows
            if row["part"] == "all_reduce"
        ),
        f"A small float32 model chose the same tokens under {same_text(result)} policies.",
    ]
    title = (
        f"{settings['shape']} with random weights, {settings['batch_size']} {TIMES} "
        f"{settings['kv_len']:,} tokens, split over GPUs by heads; one GPU has half of the CPUs. "
        f"CPUs, weights and KV are of one rank. {policy_options_note()}"
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "GPUs": "{world_size}",
        "parts": "{num_parts}",
        "ms per step": milliseconds_cell,
        "tokens/s": "{tokens_per_second:,.1f}",
        "CPUs": "{cpus_of_rank}",
        "weights": lambda row: format_bytes(row["weight_bytes_of_rank"]),
        "KV on host": lambda row: format_bytes(row["memory"]["kv_host"]),
    }
    decoded = table(columns, [row for row in rows if row["part"] == "decode"])
    return "\n\n".join([title, decoded, " ".join(said), gpu_machine_line(result)])


def two_gpu_ratios(result: dict[str, Any]) -> dict[str, float]:
    """By policy: tokens/s of two GPUs over those of one."""
    found: dict[tuple[str, int], float] = {}
    for row in result["rows"]:
        if row["part"] == "decode":
            key = (row["policy"], row["world_size"])
            found[key] = max(found.get(key, 0.0), row["tokens_per_second"])
    return {
        name: found[name, 2] / one
        for (name, size), one in found.items()
        if size == 1 and (name, 2) in found
    }


def same_tokens(result: dict[str, Any]) -> list[bool]:
    return [row["equal"] for row in result["rows"] if row["part"] == "tokens"]


def same_text(result: dict[str, Any]) -> str:
    same = same_tokens(result)
    return f"{sum(same)} of {len(same)}"
