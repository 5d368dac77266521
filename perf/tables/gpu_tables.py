"""Markdown of perf/results/gpu-*.json: what `perf.bench_gpu` measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offload.bench.decode.engines import OURS
from offload.measuring.steps.step_timeline import SHARES
from offload.system.memory import format_bytes
from perf.gpu_steps import NO_OFFLOAD
from perf.tables.markdown import (
    Columns,
    Row,
    by_context,
    context_columns,
    median,
    policy_options_note,
    table,
)

Results = Mapping[str, dict[str, Any]]  # by part: decode, peers, prefill, …
_milliseconds_cell = median("milliseconds", ",.2f")


def gpu_decode_table(results: Results) -> str:
    """Milliseconds per token of every engine at every context."""
    rows, settings = decode_rows(results), results["decode"]["settings"]
    title = (
        f"{settings['shape']} with random weights, {settings['dtype']}, batch 1: milliseconds per "
        "token by context. Keys, values and queries of our rows have the structure of real "
        f"attention and differ in every step. Medians; ±: half of the 10th to 90th percentile. "
        f"{_options_note(results['decode'])}{peers_note(results)}"
    )
    columns: Columns = {"engine": "{name}", **context_columns(rows, _milliseconds_cell)}
    return _section(results["decode"], title, columns, by_context(rows, engine_name))


def gpu_overlap_table(results: Results) -> str:
    """What overlaps in a step of ours."""
    title = (
        "Shares of traced steps (`offload bench decode --trace`): both sides work, the CPU waits "
        "for the GPU, the GPU waits for the CPU, neither works. Marks make a traced step longer. "
        f"{_options_note(results['decode'])}"
    )
    columns = {
        "policy": "`{policy}`",
        "context": "{kv_len:,}",
        **{name: f"{{shares[{name}]:.0%}}" for name in SHARES},
        "ms with marks": "{traced_milliseconds:.2f}",
    }
    return _section(results["decode"], title, columns, _of(results["decode"], OURS))


def gpu_prefill_table(results: Results) -> str:
    """Seconds of a prompt, and against a prefill that keeps nothing on the host."""
    prefill = results["prefill"]
    base = {row["kv_len"]: row["milliseconds"] for row in _of(prefill, NO_OFFLOAD)}
    title = (
        f"Prefill of one prompt in slices of {prefill['settings']['slice_tokens']:,} tokens; "
        f"*{NO_OFFLOAD}* is the same code with the same kernels, which drops each layer's keys and "
        "values on the GPU. Ours ran with the GPU's memory capped at "
        f"{format_bytes(prefill['settings']['memory_cap_bytes'])}. {_options_note(prefill)}"
    )
    columns: Columns = {
        "prefill": engine_name,
        "tokens": "{kv_len:,}",
        "s": lambda row: f"{row['milliseconds'] / 1e3:.2f}",
        "tokens/s": lambda row: f"{row['kv_len'] / row['milliseconds'] * 1e3:,.0f}",
        "of without offload": lambda row: f"{row['milliseconds'] / base[row['kv_len']]:.3f}",
        "GPU peak": lambda row: _peak_cell(row, 0),
        "beside the weights": lambda row: _peak_cell(row, row.get("weight_bytes", 0)),
    }
    return _section(prefill, title, columns, prefill["rows"])


def _peak_cell(row: Row, weight_bytes: int) -> str:
    """The GPU's memory at the peak, without so much of it, where it was measured."""
    peak = row.get("device_peak_bytes")
    return "" if peak is None else format_bytes(peak - weight_bytes)


def _options_note(result: dict[str, Any]) -> str:
    """Options of the policies of a part of `perf.bench_gpu`."""
    return policy_options_note(result["settings"]["budget_tokens"])


def _section(result: dict[str, Any], title: str, columns: Columns, rows: Iterable[Any]) -> str:
    """A table between its title and where it was measured."""
    return "\n\n".join([title, table(columns, rows), _machine_line(result)])


def _machine_line(result: dict[str, Any]) -> str:
    """Where and when it was measured."""
    machine, settings = result["machine"], result["settings"]
    versions = machine["versions"]
    changed = " with changes" if machine["uncommitted_changes"] else ""
    return (
        f"*{', '.join(machine['gpus']) or 'no GPU'}, driver {machine['nvidia_driver']}; "
        f"{machine['cpu']}, {machine['cpus_usable']} CPUs, ISA {machine['isa']}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}; commit "
        f"{machine['commit'][:12]}{changed}, {machine['date']}, run {settings['run']}.*"
    )


def decode_rows(results: Results) -> list[Row]:
    """Rows of `decode`, and of `peers` if they were measured on the same kind of machine."""
    decode, baselines = results["decode"], results.get("peers")
    rows: list[Row] = list(decode["rows"])
    if baselines is not None and _kind_of(baselines) == _kind_of(decode):
        rows += baselines["rows"]
    return rows


def peers_note(results: Results) -> str:
    """When the peers of `decode_rows` were measured, if in another run."""
    decode, baselines = results["decode"], results.get("peers")
    if (
        baselines is None
        or _kind_of(baselines) != _kind_of(decode)
        or baselines["settings"]["run"] == decode["settings"]["run"]
    ):
        return ""
    machine = baselines["machine"]
    return (
        f" transformers: another run on the same kind of machine, {machine['date']}, "
        f"transformers {machine['versions']['transformers']}."
    )


def _kind_of(result: dict[str, Any]) -> tuple[object, ...]:
    machine = result["machine"]
    return (*machine["gpus"], machine["cpu"], machine["cpus_usable"])


def _of(result: dict[str, Any], engine: str) -> list[Row]:
    return [row for row in result["rows"] if row["engine"] == engine]


def engine_name(row: Row) -> str:
    """The engine, and the policy if it has one."""
    policy = f", `{row['policy']}`" if row.get("policy") else ""
    return f"{row['engine']}{policy}"
