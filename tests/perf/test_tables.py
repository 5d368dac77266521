"""Tables of latency."""

from __future__ import annotations

from typing import Any

from cases.machine import MACHINE

from perf.tables.latency_tables import latency_phases_table, latency_table

TIMES = "\N{MULTIPLICATION SIGN}"


def row(policy: str, kv_len: int, threads: int, time: float, **changes: Any) -> dict[str, Any]:
    full = kv_len / 10 / threads
    phases = dict.fromkeys(("predict", "score", "select", "attend", "update", "other"), time / 10)
    return {
        "policy": policy,
        "kv_len": kv_len,
        "num_threads": threads,
        "microseconds": time,
        "microseconds_p10": 0.9 * time,
        "microseconds_p90": 1.1 * time,
        "phases": phases,
        "bytes_touched": 4e6,
        "bandwidth": 9e9,
        "sequential_bandwidth": 12e9 * threads,
        "gather_bandwidth": 10e9 * threads,
        "yardstick_share": 0.9,
        "candidate_share": 1.0 if policy == "full" else 0.02,
        "top_overlap": None,
        "attended_tokens": 1000.0,
        "mass_kept": 0.97,
        "build_seconds": 0.4,
        "state_share": 0.012,
        "all_layers_microseconds": 0.1 * full + 0.9 * time,
        "speedup_over_full": full / time,
        "speedup_over_exact_topk": full / time / 2,
        "thread_speedup": 1.7,
        "thread_efficiency": 0.85 if policy == "full" else 0.7,
    } | changes


RESULT: dict[str, Any] = {
    "machine": MACHINE,
    "settings": {
        "shape": "llama-3.1-8b",
        "dtype": "bfloat16",
        "batch_size": 1,
        "budget_tokens": 1024,
        "repeats": 12,
    },
    "rows": [
        row(policy, kv_len, threads, kv_len / scale / threads)
        for kv_len in (8192, 131072)
        for threads in (1, 2)
        for policy, scale in (
            *(("full", 10), ("exact_topk", 20)),
            *(("lfps", 300), ("lychee_cluster", 350)),
        )
    ],
}


def test_latency_table() -> None:
    table = latency_table(RESULT)
    assert "| policy | 8K | 128K | all layers over full at 128K | those that select |" in table
    assert f"| `full` | 819 | 13,107 | 1.0{TIMES} | 1.0{TIMES} |" in table
    assert "**one thread** (memory 12.0 GB/s in sequence, 10.0 by rows)" in table
    # A tenth of the layers takes as long as under `full`: 1 / (0.1 + 0.9 / 30) of its time.
    of_lfps = f"7.7{TIMES} | 30.0{TIMES} | 15.0{TIMES} | 2.00% | 1,000 | 97.0% | 90%"
    assert f"| `lfps` | 14 | 218 | {of_lfps} |" in table
    assert "commit 0123456789ab, 2026-01-01" in table


def test_phases_table() -> None:
    table = latency_phases_table(RESULT)
    assert "at 131,072 tokens on one thread" in table
    assert "| `full` | 13,107 ± 1,311 | 1,311 |" in table
