"""Markdown of one results file each: the tables that README and docs show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perf.tables.markdown import mark as _mark
from perf.tables.markdown import markdown_table as _table

# What issue 2 asks for; shown beside what was measured.
DENSE_BANDWIDTH_SHARE = 0.85
SPARSE_BANDWIDTH_SHARE = 0.80
TOPK_TIME_SHARE = 0.6
TRANSFORMERS_RATIO = 3.0
LLAMA_CPP_RATIO = 1.0
STARTUP_SECONDS = 3.0

TIMES = "\N{MULTIPLICATION SIGN}"


def attention_table(result: dict[str, Any]) -> str:
    """Kernels against the bandwidth of the same run."""
    settings, rows = result["settings"], result["rows"]
    dense = {row["num_threads"]: row["microseconds"] for row in rows if row["kernel"] == "dense"}
    lines = []
    for row in rows:
        share = row["bandwidth"] / row["yardstick_bandwidth"]
        of_dense = row["microseconds"] / dense[row["num_threads"]]
        verdict = {
            "dense": _verdict(
                share, f"≥ {DENSE_BANDWIDTH_SHARE:.0%}", share >= DENSE_BANDWIDTH_SHARE
            ),
            "sparse": _verdict(
                share, f"≥ {SPARSE_BANDWIDTH_SHARE:.0%}", share >= SPARSE_BANDWIDTH_SHARE
            ),
            "topk": f"{of_dense:.2f} of dense's time "
            f"(≤ {TOPK_TIME_SHARE} {_mark(of_dense <= TOPK_TIME_SHARE)})",
        }[row["kernel"]]
        lines.append(
            [
                row["kernel"],
                str(row["num_threads"]),
                f"{row['tokens']:,}",
                _microseconds(row),
                f"{row['bandwidth'] / 1e9:.1f}",
                f"{row['yardstick_bandwidth'] / 1e9:.1f} ({row['yardstick']})",
                verdict,
            ]
        )
    title = (
        f"One layer of {settings['shape']}, {settings['kv_len']:,} tokens in the cache, "
        f"{settings['dtype']}, batch 1; medians of {settings['repeats']} interleaved repeats, "
        "every output checked against a float64 reference."
    )
    header = ["kernel", "threads", "tokens per KV head", "µs", "GB/s", "memory GB/s", "target"]
    return "\n\n".join([title, _table(header, lines), machine_line(result["machine"])])


def decode_table(result: dict[str, Any]) -> str:
    """Tokens per second of every engine at every context."""
    settings, rows = result["settings"], result["rows"]
    contexts = sorted({row["context"] for row in rows})
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    speed = {(r["engine"], r["context"]): r["decode_tokens_per_second"] for r in rows}
    lines = [
        [engine, *(f"{speed[engine, context]:.1f}" for context in contexts)] for engine in engines
    ]
    title = (
        f"{settings['model']}, batch 1, {settings['threads']} threads, decode tokens/s by context "
        "length; all engines read the same real text and take turns, medians over "
        f"{rows[0]['steps']} steps. llama.cpp runs the GGUF's Q4_1 weights, the others bf16."
    )
    header = ["engine", *(f"{context:,} tokens" for context in contexts)]
    parts = [title, _table(header, lines), *decode_targets(speed, contexts)]
    return "\n\n".join([*parts, machine_line(result["machine"])])


def decode_targets(speed: dict[tuple[str, int], float], contexts: Sequence[int]) -> list[str]:
    """The ratios that issue 2 asks for, from one run."""
    lines = []
    engines = {engine for engine, _ in speed}
    fastest = {
        (family, context): max(
            speed[engine, context] for engine in engines if engine.startswith(family)
        )
        for family in ("transformers", "llama.cpp")
        for context in contexts
        if any(engine.startswith(family) for engine in engines)
    }
    for context in contexts:
        ours = speed["offload exact_topk", context]
        cells = [f"{context:,}", f"{ours / speed['transformers', context]:.1f}{TIMES}"]
        for family in ("transformers", "llama.cpp"):
            best = fastest.get((family, context))
            cells.append("" if best is None else f"{ours / best:.2f}{TIMES}")
        wanted = []
        if context >= 2048:
            met = ours >= TRANSFORMERS_RATIO * speed["transformers", context]
            wanted.append(f"≥ {TRANSFORMERS_RATIO:.0f}{TIMES} transformers {_mark(met)}")
        if context >= 7168 and ("llama.cpp", context) in fastest:
            met = ours >= LLAMA_CPP_RATIO * fastest["llama.cpp", context]
            wanted.append(f"≥ {LLAMA_CPP_RATIO:.0f}{TIMES} llama.cpp {_mark(met)}")
        lines.append([*cells, ", ".join(wanted)])
    header = [
        "`exact_topk` at context",
        "vs transformers' defaults",
        "vs its fastest setting here",
        "vs llama.cpp's fastest",
        "target",
    ]
    return [_table(header, lines)]


def prefill_table(result: dict[str, Any]) -> str:
    """Tokens per second of prefill, from the same run as `decode_table`; one measurement each."""
    rows = result["rows"]
    contexts = sorted({row["context"] for row in rows})
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    speed = {(r["engine"], r["context"]): r["prefill_tokens_per_second"] for r in rows}
    same = {
        engine: min(r["same_next_token_as_transformers"] for r in rows if r["engine"] == engine)
        for engine in engines
    }
    lines = [
        [engine, *(f"{speed[engine, c]:,.0f}" for c in contexts), f"{same[engine]:.0%}"]
        for engine in engines
    ]
    title = (
        "Prefill tokens/s by prompt length in that run (medians of three up to 2,048 tokens, one "
        "beyond), and at how many of the decoded positions the most likely next token was that of "
        "transformers bf16 (the lowest of the contexts)."
    )
    header = ["engine", *(f"{context:,} tokens" for context in contexts), "same next token"]
    return "\n\n".join([title, _table(header, lines)])


def decode_plot(result: dict[str, Any]) -> str:
    """The plot that `perf.report` draws of the same results."""
    return f"![Decode speed of {result['settings']['model']} by context length](decode.svg)"


def startup_table(result: dict[str, Any]) -> str:
    """Seconds of each phase of a fresh process."""
    settings = result["settings"]
    lines = []
    for row in result["rows"]:
        target = ""
        if (row["engine"], row["phase"]) == ("offload", "from pretrained"):
            target = f"≤ {STARTUP_SECONDS:.0f} s {_mark(row['seconds'] <= STARTUP_SECONDS)}"
        spread = (row["seconds_p90"] - row["seconds_p10"]) / 2
        lines.append([row["engine"], row["phase"], f"{row['seconds']:.2f} ± {spread:.2f}", target])
    title = (
        f"A fresh process with the converted {settings['model']}, {settings['dtype']}; medians of "
        f"{settings['repeats']} processes each."
    )
    table = _table(["engine", "phase", "seconds", "target"], lines)
    return "\n\n".join([title, table, machine_line(result["machine"])])


def machine_line(machine: dict[str, Any]) -> str:
    """Where and when it was measured."""
    versions = machine["versions"]
    commit = machine["commit"][:12] + (" with changes" if machine["uncommitted_changes"] else "")
    return (
        f"*{machine['cpu']}, {machine['cpus_usable']} of {machine['cpus_present']} CPUs, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, ISA {machine['isa']}, "
        f"{', '.join(machine['gpus']) or 'no GPU'}; Python {versions['python']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}; commit {commit}, "
        f"{machine['date']}, load {machine['load_average']:.1f} at the start. "
        "±: half of the 10th to 90th percentile.*"
    )


def _microseconds(row: dict[str, Any]) -> str:
    spread = (row["microseconds_p90"] - row["microseconds_p10"]) / 2
    return f"{row['microseconds']:,.0f} ± {spread:,.0f}"


def _verdict(share: float, wanted: str, met: bool) -> str:
    return f"{share:.0%} of it ({wanted} {_mark(met)})"
