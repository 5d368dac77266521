"""Markdown of perf/results/gpu-*.json: what `perf.bench_gpu` measured, and issue 4's targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offload.bench.decode.engines import GRAPH, OURS, STOCK, STOCK_OFFLOADED
from offload.measuring.steps.step_timeline import SHARES
from offload.system.memory import format_bytes
from perf.gpu_steps import INDEXED, NO_HANDSHAKE, NO_OFFLOAD, NULL_WORK, STREAMED
from perf.tables.markdown import (
    DEFAULT_BUDGET_TOKENS,
    TIMES,
    Columns,
    Row,
    against,
    by_context,
    context_columns,
    median,
    policy_options_note,
    table,
    target,
    targets_table,
)

Results = Mapping[str, dict[str, Any]]  # by part: decode, peers, prefill, …
# What issue 4 asks for: policy, its name in text, ms per token.
STEPS = (("lychee_cluster", "LycheeCluster", 6.0), ("lfps", "LFPS", 9.0))
PEERS = ((STOCK_OFFLOADED, 250.0), (STOCK, 7.0), (GRAPH, 1.0))
GROWTH = 1.25
HANDSHAKE_US = 10.0
DEVICE_BYTES = 3 * 2**29
STREAMED_RATIO, INDEXED_RATIO = 1.05, 1.15
PREFILL_BYTES, PREFILL_TOKENS = 24 * 2**30, 131072  # how much memory so many tokens may take
BATCH_RATIO = 10.0
milliseconds_cell = median("milliseconds", ",.2f")


def gpu_decode_table(results: Results) -> str:
    """Milliseconds per token of every engine at every context."""
    rows, settings = decode_rows(results), results["decode"]["settings"]
    title = (
        f"{settings['shape']} with random weights, {settings['dtype']}, batch 1: milliseconds per "
        "token by context. Keys, values and queries of our rows have the structure of real "
        f"attention and differ in every step. Medians; ±: half of the 10th to 90th percentile. "
        f"{_options_note(results['decode'])}"
    )
    columns: Columns = {"engine": "{name}", **context_columns(rows, milliseconds_cell)}
    return gpu_section(results["decode"], title, columns, by_context(rows, engine_name))


def gpu_overlap_table(results: Results) -> str:
    """What overlaps in a step of ours."""
    title = (
        "Shares of traced steps (`offload bench pipeline`): both sides work, the CPU waits for the "
        "GPU, the GPU waits for the CPU, neither works. Marks make a traced step longer. "
        f"{_options_note(results['decode'])}"
    )
    columns = {
        "policy": "`{policy}`",
        "context": "{kv_len:,}",
        **{name: f"{{shares[{name}]:.0%}}" for name in SHARES},
        "ms with marks": "{traced_milliseconds:.2f}",
    }
    return gpu_section(results["decode"], title, columns, _of(results["decode"], OURS))


def gpu_prefill_table(results: Results) -> str:
    """Seconds of a prompt, and against a prefill that keeps nothing on the host."""
    prefill = results["prefill"]
    base = {row["kv_len"]: row["milliseconds"] for row in _of(prefill, NO_OFFLOAD)}
    title = (
        f"Prefill of one prompt in slices of {prefill['settings']['slice_tokens']:,} tokens; "
        f"*{NO_OFFLOAD}* is the same code with the same kernels, which drops each layer's keys and "
        "values on the GPU."
    )
    cap = prefill["settings"].get("memory_cap_bytes")
    if cap is not None:
        title += f" Ours ran with the GPU's memory capped at {format_bytes(cap)}."
    title += f" {_options_note(prefill)}"
    columns: Columns = {
        "prefill": engine_name,
        "tokens": "{kv_len:,}",
        "s": lambda row: f"{row['milliseconds'] / 1e3:.2f}",
        "tokens/s": lambda row: f"{row['kv_len'] / row['milliseconds'] * 1e3:,.0f}",
        "of without offload": lambda row: f"{row['milliseconds'] / base[row['kv_len']]:.3f}",
        "GPU peak": lambda row: _peak_cell(row, 0),
        "beside the weights": lambda row: _peak_cell(row, row.get("weight_bytes", 0)),
    }
    return gpu_section(prefill, title, columns, prefill["rows"])


def _peak_cell(row: Row, weight_bytes: int) -> str:
    """The GPU's memory at the peak, without so much of it, where it was measured."""
    peak = row.get("device_peak_bytes")
    return "" if peak is None else format_bytes(peak - weight_bytes)


def gpu_batch_table(results: Results) -> str:
    """Tokens/s under a memory cap."""
    batch = results["batch"]
    title = (
        f"Sequences of {batch['settings']['kv_len']:,} tokens with the GPU's memory capped at "
        f"{format_bytes(batch['settings']['memory_cap_bytes'])}; *{GRAPH}*: the largest batch that "
        f"fits. {_options_note(batch)}"
    )
    columns: Columns = {
        "engine": engine_name,
        "batch": "{batch_size}",
        "tokens/s": "{tokens_per_second:,.1f}",
        "ms per step": milliseconds_cell,
    }
    return gpu_section(batch, title, columns, batch["rows"])


def gpu_targets_table(results: Results) -> str:
    """Issue 4's targets beside what was measured."""
    lines: list[list[str]] = []
    for part, check in _CHECKS.items():
        lines += check(results) if part in results else [target(f"part {part}", None, "")]
    note = _options_note(results["decode"])  # the others' LycheeCluster has the same
    return f"{note}\n\n{targets_table(lines)}"


def _options_note(result: dict[str, Any]) -> str:
    """Options of the policies of a part of `perf.bench_gpu`."""
    settings = result["settings"]
    alpha = {"LFPS alpha": settings["lfps_alpha"]} if "lfps_alpha" in settings else {}
    budget = settings.get("budget_tokens", DEFAULT_BUDGET_TOKENS)
    return policy_options_note(budget, **alpha)


def gpu_section(result: dict[str, Any], title: str, columns: Columns, rows: Iterable[Any]) -> str:
    """A table between its title and where it was measured."""
    return "\n\n".join([title, table(columns, rows), gpu_machine_line(result)])


def gpu_machine_line(result: dict[str, Any]) -> str:
    """Where and when it was measured."""
    machine, settings = result["machine"], result["settings"]
    versions = machine["versions"]
    changed = " with changes" if machine["uncommitted_changes"] else ""
    run = f", run {settings['run']}" if "run" in settings else ""  # of parts that share one
    return (
        f"*{', '.join(machine['gpus']) or 'no GPU'}, driver {machine['nvidia_driver']}; "
        f"{machine['cpu']}, {machine['cpus_usable']} CPUs, ISA {machine['isa']}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}; commit "
        f"{machine['commit'][:12]}{changed}, {machine['date']}{run}.*"
    )


def _decode_checks(results: Results) -> list[list[str]]:
    decode = results["decode"]
    contexts = {row["kv_len"] for row in decode["rows"]}
    longest, shortest = max(contexts), min(contexts)
    ours = {(row["policy"], row["kv_len"]): row for row in _of(decode, OURS)}
    lines = []
    for policy, name, limit in STEPS:
        if row := ours.get((policy, longest)):
            label, found = f"time per token at {longest:,}, {name}", milliseconds_cell(row)
            met = row["milliseconds"] <= limit
            lines.append(target(label, f"{found} ms", f"≤ {limit:g} ms", met))
    lychee = ours.get(("lychee_cluster", longest))
    if lychee is None:
        return lines
    peers = {row["engine"]: row for row in decode_rows(results) if row["kv_len"] == longest}
    for engine, ratio in PEERS:
        label = f"against {engine}, {longest:,}"
        if engine in peers:
            lines.append(against(label, lychee, peers[engine], ratio))
        else:
            lines.append([label, "", "", "not measured in the same run"])
    growth = lychee["milliseconds"] / ours["lychee_cluster", shortest]["milliseconds"]
    label = f"growth from {shortest:,} to {longest:,}, LycheeCluster"
    lines.append(target(label, f"{growth:.2f}{TIMES}", f"≤ {GROWTH}{TIMES}", growth <= GROWTH))
    device = lychee["memory"].get("device")
    if device is not None:
        label, wanted = f"GPU memory at {longest:,} beyond the weights", format_bytes(DEVICE_BYTES)
        lines.append(target(label, format_bytes(device), f"≤ {wanted}", device <= DEVICE_BYTES))
    return lines


def _handshake_checks(results: Results) -> list[list[str]]:
    (null,), (none,) = (_of(results["handshake"], name) for name in (NULL_WORK, NO_HANDSHAKE))
    exposed = (null["milliseconds"] - none["milliseconds"]) / null["host_layers"] * 1e3
    label, wanted = "exposed handshake cost per layer (null CPU work)", f"≤ {HANDSHAKE_US:g} µs"
    return [target(label, f"{exposed:.1f} µs", wanted, exposed <= HANDSHAKE_US)]


def _prefill_checks(results: Results) -> list[list[str]]:
    prefill, lines = results["prefill"], []
    for base in _of(prefill, NO_OFFLOAD):
        for engine, limit in ((STREAMED, STREAMED_RATIO), (INDEXED, INDEXED_RATIO)):
            for row in _of(prefill, engine):
                if row["kv_len"] == base["kv_len"]:
                    ratio = row["milliseconds"] / base["milliseconds"]
                    label = f"prefill of {row['kv_len']:,}, {engine}"
                    wanted = f"≤ {limit}{TIMES}"
                    lines.append(target(label, f"{ratio:.3f}{TIMES}", wanted, ratio <= limit))
    held = [
        row["device_reserved_bytes"]
        for row in _of(prefill, INDEXED)
        if row["kv_len"] == PREFILL_TOKENS and row.get("device_reserved_bytes") is not None
    ]
    label = f"prefill of {PREFILL_TOKENS:,}, GPU memory with the weights"
    wanted = f"≤ {format_bytes(PREFILL_BYTES)}"
    if not held:  # of a shorter prompt it says nothing
        return [*lines, target(label, None, wanted)]
    return [*lines, target(label, format_bytes(held[0]), wanted, held[0] <= PREFILL_BYTES)]


def _batch_checks(results: Results) -> list[list[str]]:
    batch = results["batch"]
    ours, stock = _of(batch, OURS), _of(batch, STOCK_OFFLOADED)
    if not ours or not stock:
        return [["batch", "", "", "not measured"]]
    ratio = ours[0]["tokens_per_second"] / stock[0]["tokens_per_second"]
    settings = batch["settings"]
    label = (
        f"batch {ours[0]['batch_size']} {TIMES} {settings['kv_len']:,} under "
        f"{format_bytes(settings['memory_cap_bytes'])}, tokens/s against {STOCK_OFFLOADED}"
    )
    wanted = f"≥ {BATCH_RATIO:g}{TIMES}"
    return [target(label, f"{ratio:.1f}{TIMES}", wanted, ratio >= BATCH_RATIO)]


def _smollm2_checks(results: Results) -> list[list[str]]:
    rows, settings = results["smollm2"]["rows"], results["smollm2"]["settings"]
    same = sum(row["same"] for row in rows)
    label = (
        f"{settings['model']}, {settings['dtype']}, greedy at {settings['context']:,} tokens: "
        "policies that say the CPU backend's tokens"
    )
    return [target(label, f"{same} of {len(rows)}", "all", same == len(rows))]


_CHECKS: dict[str, Callable[[Results], list[list[str]]]] = {
    "decode": _decode_checks,
    "handshake": _handshake_checks,
    "prefill": _prefill_checks,
    "batch": _batch_checks,
    "smollm2": _smollm2_checks,
}
PARTS = ("peers", *_CHECKS)


def decode_rows(results: Results) -> list[Row]:
    """Rows of `decode`, and of `peers` if they were measured in the same run."""
    decode, peers = results["decode"], results.get("peers")
    rows: list[Row] = list(decode["rows"])
    if peers is not None and peers["settings"]["run"] == decode["settings"]["run"]:
        rows += peers["rows"]
    return rows


def _of(result: dict[str, Any], engine: str) -> list[Row]:
    return [row for row in result["rows"] if row["engine"] == engine]


def engine_name(row: Row) -> str:
    """The engine, and the policy if it has one."""
    policy = f", `{row['policy']}`" if row.get("policy") else ""
    return f"{row['engine']}{policy}"
