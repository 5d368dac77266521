"""Markdown of what placements, their kernels, plans and two GPUs were measured to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from offload.bench.decode.engines import OURS
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
    median,
    policy_options_note,
    table,
)

RETRIEVAL_VARIANT = "attention, top-k"
_VARIANTS = (
    *("attention", "attention, scores", RETRIEVAL_VARIANT),
    *("top-k alone", "top-k shared"),
)
_RULE_VARIANTS = ("top-p alone", "threshold alone")  # not of older measurements
_COUNTED = ("kv_device", "device", "host")  # bytes of a plan that were counted, too
_microseconds_cell = median("microseconds", ".1f")


def gpu_heads_table(result: dict[str, Any]) -> str:
    """Milliseconds per token by who attends to which heads, beside the peers of the same run."""
    rows, settings = result["rows"], result["settings"]
    longest = {_placed(row): row for row in sorted(rows, key=lambda row: row["kv_len"])}

    def kept(of_name: dict[Any, Any]) -> str:
        held = longest[of_name["name"]].get("memory", {}).get("kv_device")
        return "" if held is None else format_bytes(held)

    budgets = ", ".join(f"`{name}` {settings['budgets'][name]:,}" for name in settings["names"])
    title = (
        f"{settings['shape']} with random weights, {settings['dtype']}, batch 1: milliseconds per "
        f"token by who attends to which KV heads; budgets: {budgets} tokens. Gathered: of each "
        "layer's heads that reuse a selection, at most so many have their rows fetched by the GPU; "
        "the CPU attends for the others. As planned: as `offload plan` places them. Medians; ±: "
        "half of the 10th to 90th percentile. Other options are the defaults; "
        "[results](results.md) judge them with a budget of 1,024 and a model of 135M parameters."
    )
    columns: Columns = {
        "engine": "{name[0]}",
        "heads that retrieve": "{name[1]}",
        "gathered": "{name[2]}",
        **context_columns(rows, milliseconds_cell),
        "KV on the GPU": kept,
    }
    return gpu_section(result, title, columns, by_context(rows, _placed))


def _placed(row: Row) -> tuple[str, str, str]:
    """Engine, where its retrieving heads are, and how many others are gathered."""
    if row["engine"] != OURS:
        return row["engine"], "", ""
    gathered = row["gathered_heads"]
    engine = f"{OURS}, `{row['policy']}`"
    if gathered is None:
        return engine, "as planned", "as planned"
    if row.get("coded"):
        return engine, "by codes on the GPU", "0"
    return engine, "CPU" if gathered < 0 else "GPU", str(max(0, gathered))


def gpu_gather_table(result: dict[str, Any]) -> str:
    """Selected rows of host pages: fetched and attended to by the GPU, or attended by the CPU."""
    # By (tokens, heads), of the GPU (None) the fastest launch, and the CPU by its threads.
    points: dict[tuple[int, int], dict[int | None, Row]] = {}
    for row in sorted(result["rows"], key=lambda row: row["microseconds"]):
        of_point = points.setdefault((row["tokens"], row["heads"]), {})
        of_point.setdefault(row.get("threads"), row)

    def gpu_columns(name: str) -> Any:
        return lambda point: f"{points[point][None][name]:.1f}" if None in points[point] else ""

    def cpu_cell(threads: int, point: tuple[int, int]) -> str:
        cpu, gpu = points[point].get(threads), points[point].get(None)
        if cpu is None or gpu is None:
            return "" if cpu is None else _microseconds_cell(cpu)
        ratio = cpu["microseconds"] / gpu["microseconds"]
        faster = f"GPU {ratio:.2f}{TIMES}" if ratio > 1 else f"CPU {1 / ratio:.2f}{TIMES}"
        return f"{_microseconds_cell(cpu)}, {faster}"

    title = (
        f"Attention of a layer to selected rows of {result['settings']['kv_len']:,} tokens in host "
        "memory, µs: the GPU fetches them, and then attends to them; or the CPU attends. Tokens "
        "are of each KV head. Medians; ±: half of the 10th to 90th percentile; behind it which of "
        "the two is faster."
    )
    columns: Columns = {
        "tokens": lambda point: f"{point[0]:,}",
        "heads": lambda point: f"{point[1]}",
        "fetching, GB/s": gpu_columns("gather_gigabytes_per_second"),
        "fetching": gpu_columns("gather_microseconds"),
        "and attention": gpu_columns("microseconds"),
        **{
            f"CPU, {n} threads": partial(cpu_cell, n)
            for n in sorted({row["threads"] for row in result["rows"] if row["engine"] == "CPU"})
        },
    }
    return gpu_section(result, title, columns, sorted(points))


def gpu_retrieval_table(result: dict[str, Any]) -> str:
    """Retrieval heads: attention to all tokens, and the list of the heaviest ones."""
    settings = result["settings"]
    points: dict[tuple[int, int], dict[str, Row]] = {}
    for row in result["rows"]:
        points.setdefault((row["tokens"], row["heads"]), {})[row["variant"]] = row

    measured = {row["variant"] for row in result["rows"]}
    by_rules = [name for name in _RULE_VARIANTS if name in measured]

    def value(variant: str, name: str, form: str) -> Any:
        def cell(point: tuple[int, int]) -> str:
            found = points[point].get(variant, {}).get(name)
            return "" if found is None else format(found, form)

        return cell

    fastest = max(settings["bandwidth_gigabytes_per_second"].values())
    title = (
        "Retrieval heads of one layer of llama-3.1-8b, batch 1, µs: attention alone; leaving the "
        "scores; with the top-k that follows. Then the top-k alone, a list for each head or one "
        f"for all; lists of {settings['budget_tokens']:,} tokens. The share is of {fastest:,.0f} "
        f"GB/s, the most that a plain read or copy reached in the same run: {RETRIEVAL_VARIANT}."
    )
    columns: Columns = {
        "tokens": lambda point: f"{point[0]:,}",
        "KV heads": lambda point: f"{point[1]}",
        **{name: value(name, "microseconds", ".1f") for name in (*_VARIANTS, *by_rules)},
        "of the memory's": value(RETRIEVAL_VARIANT, "bandwidth_share", ".0%"),
    }
    return gpu_section(result, title, columns, sorted(points))


def gpu_codes_table(result: dict[str, Any]) -> str:
    """Lists of the tokens whose codes score most, and making codes."""
    settings = result["settings"]
    points: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in result["rows"]:
        if not row["variant"].startswith("sweep"):
            point = (row["tokens"], row["heads"], row["bits"])
            points.setdefault(point, {})[row["variant"]] = row

    def of_variant(name: str) -> Any:
        return lambda point: f"{points[point][name]['microseconds']:.1f}"

    fastest = max(settings["bandwidth_gigabytes_per_second"].values())
    title = (
        "Codes of one layer of llama-3.1-8b, batch 1, µs: scores of all tokens and the top-k that "
        "follows, the last launch, of the top-k, alone, and making the codes of all keys; the "
        f"sketch's candidates for a budget of {settings['budget_tokens']:,} tokens. Beside it what "
        f"only reading the codes takes at {fastest:,.0f} GB/s, the most that a plain read or copy "
        "reached in the same run."
    )
    columns: Columns = {
        "tokens": lambda point: f"{point[0]:,}",
        "KV heads": lambda point: f"{point[1]}",
        "bits": lambda point: f"{point[2]}",
        **{
            name: of_variant(name) for name in ("scores, top-k", "top-k alone", "codes of all keys")
        },
        "reading": lambda point: (
            f"{next(iter(points[point].values()))['bytes'] / fastest / 1e3:.1f}"
        ),
    }
    return gpu_section(result, title, columns, sorted(points))


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
