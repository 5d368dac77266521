"""Markdown of perf/results/gpu-*.json: what `perf.bench_gpu` measured, and issue 4's targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offload.bench.decode.engines import GRAPH, OURS, STOCK, STOCK_OFFLOADED
from offload.bench.pipeline.step_timeline import SHARES
from offload.system.memory import format_bytes
from perf.gpu_steps import INDEXED, NO_HANDSHAKE, NO_OFFLOAD, NULL_WORK, STREAMED
from perf.tables.markdown import mark, markdown_table

Results = Mapping[str, dict[str, Any]]  # by part: decode, peers, prefill, …
Row = dict[str, Any]
TIMES = "\N{MULTIPLICATION SIGN}"
# What issue 4 asks for.
LYCHEE_MS, LFPS_MS = 6.0, 9.0
OVER_OFFLOADED, OVER_STOCK = 250.0, 7.0
GROWTH = 1.25
HANDSHAKE_US = 10.0
DEVICE_BYTES = 1.5 * 2**30
STREAMED_RATIO, INDEXED_RATIO = 1.05, 1.15
PREFILL_BYTES, PREFILL_TOKENS = 24 * 2**30, 131072  # how much memory so many tokens may take
BATCH_RATIO = 10.0


def gpu_decode_table(results: Results) -> str:
    """Milliseconds per token of every engine at every context."""
    decode = results["decode"]
    rows = decode_rows(results)
    contexts = sorted({row["kv_len"] for row in rows})
    names = list(dict.fromkeys(engine_name(row) for row in rows))
    cells = {(engine_name(row), row["kv_len"]): milliseconds_cell(row) for row in rows}
    lines = [[name, *(cells.get((name, context), "") for context in contexts)] for name in names]
    settings = decode["settings"]
    title = (
        f"{settings['shape']} with random weights, {settings['dtype']}, batch 1: milliseconds per "
        "token by context. Keys, values and queries of our rows have the structure of real "
        f"attention and differ in every step; budget {settings['budget_tokens']:,} tokens, LFPS "
        f"alpha {settings['lfps_alpha']}. Medians; ±: half of the 10th to 90th percentile."
    )
    header = ["engine", *(f"{context:,} tokens" for context in contexts)]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(decode)])


def gpu_overlap_table(results: Results) -> str:
    """What overlaps in a step of ours."""
    decode = results["decode"]
    lines = [
        [
            f"`{row['policy']}`",
            f"{row['kv_len']:,}",
            *(f"{row['shares'][name]:.0%}" for name in SHARES),
            f"{row['traced_milliseconds']:.2f}",
        ]
        for row in _of(decode, OURS)
    ]
    title = (
        "Shares of traced steps (`offload bench pipeline`): both sides work, the CPU waits for the "
        "GPU, the GPU waits for the CPU, neither works. Marks make a traced step longer."
    )
    header = ["policy", "context", *SHARES, "ms with marks"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(decode)])


def gpu_prefill_table(results: Results) -> str:
    """Seconds of a prompt, and against a prefill that keeps nothing on the host."""
    prefill = results["prefill"]
    base = {row["kv_len"]: row["milliseconds"] for row in _of(prefill, NO_OFFLOAD)}
    lines = [
        [
            engine_name(row),
            f"{row['kv_len']:,}",
            f"{row['milliseconds'] / 1e3:.2f}",
            f"{row['kv_len'] / row['milliseconds'] * 1e3:,.0f}",
            f"{row['milliseconds'] / base[row['kv_len']]:.3f}",
            *_prefill_memory(row),
        ]
        for row in prefill["rows"]
    ]
    slices = prefill["settings"]["slice_tokens"]
    title = (
        f"Prefill of one prompt in slices of {slices:,} tokens; *{NO_OFFLOAD}* is the same code "
        "with the same kernels, which drops each layer's keys and values on the GPU."
    )
    cap = prefill["settings"].get("memory_cap_bytes")
    if cap is not None:
        title += f" Ours ran with the GPU's memory capped at {format_bytes(cap)}."
    header = ["prefill", "tokens", "s", "tokens/s", "of without offload"]
    header += ["GPU peak", "beside the weights"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(prefill)])


def _prefill_memory(row: Row) -> list[str]:
    """The GPU's memory at the peak, and without the weights, where it was measured."""
    peak = row.get("device_peak_bytes")
    if peak is None:
        return ["", ""]
    return [format_bytes(peak), format_bytes(peak - row["weight_bytes"])]


def gpu_batch_table(results: Results) -> str:
    """Tokens/s under a memory cap."""
    batch = results["batch"]
    settings = batch["settings"]
    lines = [
        [
            engine_name(row),
            str(row["batch_size"]),
            f"{row['tokens_per_second']:,.1f}",
            milliseconds_cell(row),
        ]
        for row in batch["rows"]
    ]
    title = (
        f"Sequences of {settings['kv_len']:,} tokens with the GPU's memory capped at "
        f"{format_bytes(settings['memory_cap_bytes'])}; *{GRAPH}*: the largest batch that fits."
    )
    header = ["engine", "batch", "tokens/s", "ms per step"]
    return "\n\n".join([title, markdown_table(header, lines), gpu_machine_line(batch)])


def gpu_targets_table(results: Results) -> str:
    """Issue 4's targets beside what was measured."""
    lines: list[list[str]] = []
    for part, check in _CHECKS:
        if part in results:
            lines += check(results)
        else:
            lines.append([f"part {part}", "", "", "not measured yet"])
    header = ["measure", "measured", "target", ""]
    return markdown_table(header, lines)


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
    longest = max(row["kv_len"] for row in decode["rows"])
    shortest = min(row["kv_len"] for row in decode["rows"])
    ours = {(row["policy"], row["kv_len"]): row for row in _of(decode, OURS)}
    lychee, lfps = ours.get(("lychee_cluster", longest)), ours.get(("lfps", longest))
    lines = []
    for name, row, limit in (("LycheeCluster", lychee, LYCHEE_MS), ("LFPS", lfps, LFPS_MS)):
        if row is not None:
            found = row["milliseconds"]
            lines.append(
                target_line(
                    f"time per token at {longest:,}, {name}",
                    f"{milliseconds_cell(row)} ms",
                    f"≤ {limit:g} ms",
                    found <= limit,
                )
            )
    if lychee is None:
        return lines
    time = lychee["milliseconds"]
    found_peers = {row["engine"]: row for row in decode_rows(results) if row["kv_len"] == longest}
    for engine, ratio in ((STOCK_OFFLOADED, OVER_OFFLOADED), (STOCK, OVER_STOCK), (GRAPH, 1.0)):
        label = f"against {engine}, {longest:,}"
        if engine not in found_peers:
            lines.append([label, "", "", "not measured in the same run"])
            continue
        over = found_peers[engine]["milliseconds"] / time
        wanted = "faster" if ratio == 1 else f"≥ {ratio:g}{TIMES}"
        met = over > 1 if ratio == 1 else over >= ratio
        lines.append(target_line(label, f"{over:.2f}{TIMES}", wanted, met))
    growth = time / ours["lychee_cluster", shortest]["milliseconds"]
    label = f"growth from {shortest:,} to {longest:,}, LycheeCluster"
    lines.append(target_line(label, f"{growth:.2f}{TIMES}", f"≤ {GROWTH}{TIMES}", growth <= GROWTH))
    device = lychee["memory"].get("device")
    if device is not None:
        label = f"GPU memory at {longest:,} beyond the weights"
        wanted = f"≤ {format_bytes(int(DEVICE_BYTES))}"
        lines.append(target_line(label, format_bytes(device), wanted, device <= DEVICE_BYTES))
    return lines


def _handshake_checks(results: Results) -> list[list[str]]:
    (null,), (none,) = (_of(results["handshake"], name) for name in (NULL_WORK, NO_HANDSHAKE))
    exposed = (null["milliseconds"] - none["milliseconds"]) / null["host_layers"] * 1e3
    wanted = f"≤ {HANDSHAKE_US:g} µs"
    label = "exposed handshake cost per layer (null CPU work)"
    return [target_line(label, f"{exposed:.1f} µs", wanted, exposed <= HANDSHAKE_US)]


def _prefill_checks(results: Results) -> list[list[str]]:
    prefill, lines = results["prefill"], []
    for base in _of(prefill, NO_OFFLOAD):
        for engine, limit in ((STREAMED, STREAMED_RATIO), (INDEXED, INDEXED_RATIO)):
            for row in _of(prefill, engine):
                if row["kv_len"] == base["kv_len"]:
                    ratio = row["milliseconds"] / base["milliseconds"]
                    label = f"prefill of {row['kv_len']:,}, {engine}"
                    wanted = f"≤ {limit}{TIMES}"
                    lines.append(target_line(label, f"{ratio:.3f}{TIMES}", wanted, ratio <= limit))
    wanted = f"≤ {format_bytes(PREFILL_BYTES)}"
    held = [
        row["device_reserved_bytes"]
        for row in _of(prefill, INDEXED)
        if row["kv_len"] == PREFILL_TOKENS and row.get("device_reserved_bytes") is not None
    ]
    label = f"prefill of {PREFILL_TOKENS:,}, GPU memory with the weights"
    if held:
        lines.append(target_line(label, format_bytes(held[0]), wanted, held[0] <= PREFILL_BYTES))
    else:  # of a shorter prompt it says nothing
        lines.append([label, "", wanted, "not measured yet"])
    return lines


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
    return [target_line(label, f"{ratio:.1f}{TIMES}", wanted, ratio >= BATCH_RATIO)]


def _smollm2_checks(results: Results) -> list[list[str]]:
    smollm2 = results["smollm2"]
    same = [row["policy"] for row in smollm2["rows"] if row["same"]]
    count = len(smollm2["rows"])
    settings = smollm2["settings"]
    label = (
        f"{settings['model']}, {settings['dtype']}, greedy at {settings['context']:,} tokens: "
        "policies that say the CPU backend's tokens"
    )
    return [target_line(label, f"{len(same)} of {count}", "all", len(same) == count)]


_CHECKS: tuple[tuple[str, Callable[[Results], list[list[str]]]], ...] = (
    ("decode", _decode_checks),
    ("handshake", _handshake_checks),
    ("prefill", _prefill_checks),
    ("batch", _batch_checks),
    ("smollm2", _smollm2_checks),
)
PARTS = ("decode", "peers", "prefill", "batch", "handshake", "smollm2")


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
    return row["engine"] + (f", `{row['policy']}`" if row.get("policy") else "")


def milliseconds_cell(row: Row) -> str:
    """The median, and half of the 10th to 90th percentile."""
    spread = (row["milliseconds_p90"] - row["milliseconds_p10"]) / 2
    return f"{row['milliseconds']:,.2f} ± {spread:,.2f}"


def target_line(label: str, measured: str, wanted: str, met: bool) -> list[str]:
    """A line of a table of targets."""
    return [label, measured, wanted, mark(met)]
