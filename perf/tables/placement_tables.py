"""Markdown of what placements, their kernels, plans and two GPUs were measured to do."""

from __future__ import annotations

from typing import Any

from offload.bench.decode.engines import OURS
from offload.decode.gpu.placement import LETTERS, Place
from offload.system.memory import format_bytes
from perf.tables.gpu_tables import TIMES, Row, gpu_machine_line, milliseconds_cell
from perf.tables.markdown import markdown_table

# Results file -> what measures it.
COMMANDS = {
    "gpu-heads": "perf.bench_gpu --only heads",
    "gpu-retrieval": "perf.bench_heads",
    "gpu-gather": "perf.bench_gather",
    "gpu-hybrid": "perf.bench_hybrid",
    "gpu-plan": "perf.bench_plan",
    "gpu-tp": "perf.bench_tp",
}
RETRIEVAL_VARIANT = "attention, top-k"
_ATTENTIONS = ("attention", "attention, scores", RETRIEVAL_VARIANT)
_TOP_KS = ("top-k alone", "top-k shared")
_COUNTED = ("kv_device", "device", "host")  # bytes of a plan that were counted, too


def not_measured(results_name: str) -> str:
    """What stands in place of a table."""
    command = COMMANDS[results_name]
    return f"*Not measured yet: run `python -m {command}` on a machine with a GPU.*"


def gpu_heads_table(result: dict[str, Any]) -> str:
    """Milliseconds per token by who attends to which heads, beside the peers of the same run."""
    rows, settings = result["rows"], result["settings"]
    contexts = sorted({row["kv_len"] for row in rows})
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        found.setdefault(_placed(row), {})[row["kv_len"]] = row
    lines = []
    for name, of_name in found.items():
        times = [milliseconds_cell(of_name[n]) if n in of_name else "" for n in contexts]
        kept = of_name[max(of_name)].get("memory", {}).get("kv_device")
        lines.append([*name, *times, "" if kept is None else format_bytes(kept)])
    budgets = ", ".join(f"`{name}` {tokens:,}" for name, tokens in settings["budgets"].items())
    title = (
        f"{settings['shape']} with random weights, {settings['dtype']}, batch 1: milliseconds per "
        f"token by who attends to which KV heads; budgets: {budgets} tokens. Gathered: of each "
        "layer's heads that reuse a selection, at most so many have their rows fetched by the GPU; "
        "the CPU attends for the others. As planned: as `offload plan` places them. Medians; ±: "
        "half of the 10th to 90th percentile."
    )
    header = ["engine", "heads that retrieve", "gathered"]
    header += [f"{context:,} tokens" for context in contexts] + ["KV on the GPU"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(result)])


def _placed(row: Row) -> tuple[str, str, str]:
    """Engine, where its retrieving heads are, and how many others are gathered."""
    if row["engine"] != OURS:
        return row["engine"], "", ""
    gathered = row["gathered_heads"]
    engine = f"{OURS}, `{row['policy']}`"
    if gathered is None:
        return engine, "as planned", "as planned"
    return engine, "CPU" if gathered < 0 else "GPU", str(max(0, gathered))


def gpu_gather_table(result: dict[str, Any]) -> str:
    """Selected rows of host pages: fetched and attended to by the GPU, or attended by the CPU."""
    rows, settings = result["rows"], result["settings"]
    threads = sorted({row["threads"] for row in rows if row["engine"] == "CPU"})
    lines = []
    for tokens, heads in sorted({(row["tokens"], row["heads"]) for row in rows}):
        of_point = [row for row in rows if (row["tokens"], row["heads"]) == (tokens, heads)]
        gpus = [row for row in of_point if row["engine"] == "GPU"]
        gpu = min(gpus, key=lambda row: row["microseconds"], default=None)
        line = [f"{tokens:,}", str(heads)]
        if gpu is None:
            line += ["", "", ""]
        else:
            line.append(f"{gpu['gather_gigabytes_per_second']:.1f}")
            line += [f"{gpu[name]:.1f}" for name in ("gather_microseconds", "microseconds")]
        for number in threads:
            cpu = next((row for row in of_point if row.get("threads") == number), None)
            line.append("" if cpu is None else _cpu_cell(cpu, gpu))
        lines.append(line)
    title = (
        f"Attention of a layer to selected rows of {settings['kv_len']:,} tokens in host memory, "
        "µs: the GPU fetches them, and then attends to them; or the CPU attends. Tokens are of "
        "each KV head. Medians; ±: half of the 10th to 90th percentile; behind it which of the two "
        "is faster."
    )
    header = ["tokens", "heads", "fetching, GB/s", "fetching", "and attention"]
    header += [f"CPU, {number} threads" for number in threads]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(result)])


def _cpu_cell(cpu: Row, gpu: Row | None) -> str:
    spread = (cpu["microseconds_p90"] - cpu["microseconds_p10"]) / 2
    cell = f"{cpu['microseconds']:.1f} ± {spread:.1f}"
    if gpu is None:
        return cell
    ratio = cpu["microseconds"] / gpu["microseconds"]
    faster = f"GPU {ratio:.2f}{TIMES}" if ratio > 1 else f"CPU {1 / ratio:.2f}{TIMES}"
    return f"{cell}, {faster}"


def gpu_hybrid_table(result: dict[str, Any]) -> str:
    """Dense and block-sparse heads in one launch, and what torch takes for all of the tokens."""
    lines = []
    for row in result["rows"]:
        if row["fastest"]:
            ratio = "" if row["engine"] != OURS else torch_ratio(result, row)
            lines.append(
                [
                    row["engine"],
                    f"{row['kv_len']:,}",
                    row["case"],
                    f"{row['microseconds']:.1f}",
                    f"{row['gigabytes_per_second']:,.0f}",
                    f"{ratio:.2f}{TIMES}" if ratio else "",
                ]
            )
    blocks = result["settings"]["block_tokens"]
    title = (
        f"Attention of one layer of llama-3.1-8b, batch 1, over pages on the GPU; sparse heads "
        f"attend to blocks of {blocks} tokens. The fastest launch of each case, and of torch's "
        "ways to attend to everything; times as fast as that."
    )
    header = ["engine", "tokens", "heads", "µs", "GB/s", "as fast as torch"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(result)])


def torch_ratio(result: dict[str, Any], row: Row) -> float | None:
    """How many times as fast as the fastest of torch at this length."""
    times = [
        other["microseconds"]
        for other in result["rows"]
        if other["engine"] != OURS and other["kv_len"] == row["kv_len"]
    ]
    return min(times) / row["microseconds"] if times else None


def gpu_retrieval_table(result: dict[str, Any]) -> str:
    """Retrieval heads: attention to all tokens, and the list of the heaviest ones."""
    settings = result["settings"]
    found = {(row["tokens"], row["heads"], row["variant"]): row for row in result["rows"]}
    lines = []
    for tokens, heads in sorted({key[:2] for key in found}):
        of_point = [found.get((tokens, heads, name)) for name in (*_ATTENTIONS, *_TOP_KS)]
        share = found.get((tokens, heads, RETRIEVAL_VARIANT), {}).get("bandwidth_share")
        lines.append(
            [
                f"{tokens:,}",
                str(heads),
                *("" if row is None else f"{row['microseconds']:.1f}" for row in of_point),
                "" if share is None else f"{share:.0%}",
            ]
        )
    fastest = max(settings["bandwidth_gigabytes_per_second"].values())
    title = (
        "Retrieval heads of one layer of llama-3.1-8b, batch 1, µs: attention alone; leaving the "
        "scores; with the top-k that follows. Then the top-k alone, a list for each head or one "
        f"for all; lists of {settings['budget_tokens']:,} tokens. The share is of {fastest:,.0f} "
        f"GB/s, the most that a plain read or copy reached in the same run: {RETRIEVAL_VARIANT}."
    )
    header = ["tokens", "KV heads", *_ATTENTIONS, *_TOP_KS, "of the memory's"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(result)])


def gpu_plan_table(result: dict[str, Any]) -> str:
    """Predicted beside measured steps, planned beside taken bytes."""
    lines = [
        [
            f"`{row['policy']}`",
            f"{row['kv_len']:,}",
            f"{row['budget_tokens']:,}",
            str(row["threads"]),
            " ".join(
                f"{LETTERS[place]} {row['heads'][place.name]}"
                for place in (Place.GPU, Place.GATHER, Place.CPU)
            ),
            f"{row['predicted_milliseconds']:.2f}",
            milliseconds_cell(row),
            f"{row['error']:+.1%}",
            _bytes_cell(row),
        ]
        for row in result["rows"]
    ]
    settings = result["settings"]
    title = (
        f"Steps of {settings['shape']}, {settings['dtype']}, batch 1, predicted from the machine's "
        "profile, and measured; with the placement that `offload plan` chooses, and with dense "
        "layers only. KV heads: G on the GPU, g gathered, . on the CPU. Bytes: of KV on the GPU, "
        "of all beside the weights there, and of KV on the host, the count that is off most."
    )
    header = ["policy", "tokens", "budget", "threads", "KV heads", "predicted ms", "measured ms"]
    header += ["off by", "bytes off by"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(result)])


def bytes_errors(row: Row) -> list[float]:
    """Of planned bytes against taken ones, of what was counted of both."""
    pairs = [(row[f"planned_{name}_bytes"], row[f"{name}_bytes"]) for name in _COUNTED]
    return [planned / taken - 1 for planned, taken in pairs if planned and taken]


def _bytes_cell(row: Row) -> str:
    errors = bytes_errors(row)
    return f"{max(errors, key=abs):+.1%}" if errors else ""


def gpu_tp_table(result: dict[str, Any]) -> str:
    """Tokens/s of a batch on one GPU and on two."""
    rows, settings = result["rows"], result["settings"]
    lines = [
        [
            f"`{row['policy']}`",
            str(row["world_size"]),
            str(row["num_parts"]),
            milliseconds_cell(row),
            f"{row['tokens_per_second']:,.1f}",
            str(row["cpus_of_rank"]),
            format_bytes(row["weight_bytes_of_rank"]),
            format_bytes(row["memory"]["kv_host"]),
        ]
        for row in rows
        if row["part"] == "decode"
    ]
    said = [
        f"Two GPUs against one, each in as many parts as are faster: {_ratios_text(result)}.",
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
        "CPUs, weights and KV are of one rank."
    )
    header = ["policy", "GPUs", "parts", "ms per step", "tokens/s", "CPUs", "weights", "KV on host"]
    table = markdown_table(header, lines)
    return "\n\n".join([title, table, " ".join(said), gpu_machine_line(result)])


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


def _ratios_text(result: dict[str, Any]) -> str:
    return ", ".join(
        f"`{name}` {ratio:.2f}{TIMES}" for name, ratio in two_gpu_ratios(result).items()
    )


def same_tokens(result: dict[str, Any]) -> list[bool]:
    return [row["equal"] for row in result["rows"] if row["part"] == "tokens"]


def same_text(result: dict[str, Any]) -> str:
    same = same_tokens(result)
    return f"{sum(same)} of {len(same)}"
