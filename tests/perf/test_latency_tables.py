"""The tables of perf/results/latency.json."""

from __future__ import annotations

from typing import Any

import pytest

from perf.tables.latency_tables import (
    latency_phases_table,
    latency_table,
    latency_targets_table,
    lfps_bookkeeping,
)

TIMES = "\N{MULTIPLICATION SIGN}"
MACHINE: dict[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
    "cpu": "A CPU",
    "cpus_present": 4,
    "cpus_usable": 2,
    "memory_bytes": 24 * 2**30,
    "isa": "avx2",
    "gpus": [],
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "date": "2026-01-01",
    "load_average": 0.1,
}


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


def bookkept(policy: str, kv_len: int, share: float, predict: float, update: float) -> Any:
    phases = {"predict": predict, "score": 1, "select": 1, "attend": 1, "update": update}
    return row(policy, kv_len, 1, 100.0, candidate_share=share, phases=phases | {"other": 0})


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


def test_targets() -> None:
    table = latency_targets_table(RESULT)
    # Of all layers, a tenth of which takes as long as under `full`.
    selects = "those that select"
    aim = f"(aim 40{TIMES}) **missed** |"
    assert f"`full` | 7.7{TIMES} (30.0{TIMES} {selects}) | ≥ 22.8{TIMES} {aim}" in table
    aim = f"(aim 15{TIMES}) **missed** |"
    assert f"`exact_topk` | 4.2{TIMES} (15.0{TIMES} {selects}) | ≥ 9.6{TIMES} {aim}" in table
    assert f"`full` | 8.0{TIMES} (35.0{TIMES} {selects}) | ≥ 40{TIMES} **missed** |" in table
    assert "its update, of the step's time at 128K | 10.00% | < 1% **missed** |" in table
    assert f"8K to 128K | 16.0{TIMES} | ≤ 4{TIMES} **missed** |" in table
    assert "2 threads against one thread" in table
    assert table.count("| 70% | ≥ 80% **missed** |") == 3
    assert "| 85% | ≥ 80% met |" in table


@pytest.mark.parametrize(
    ("as_fast", "verdict"),
    [(20, f"(aim 40{TIMES}) **missed**"), (30, f"(aim 40{TIMES}) met"), (50, "(aim reached) met")],
)
def test_all_layers_decide(as_fast: int, verdict: str) -> None:
    changed = [
        x | {"all_layers_microseconds": x["kv_len"] / 10 / x["num_threads"] / as_fast}
        if x["policy"] == "lfps"
        else x
        for x in RESULT["rows"]
    ]
    table = latency_targets_table(RESULT | {"rows": changed})
    measured = f"{as_fast}.0{TIMES} (30.0{TIMES} those that select)"
    assert f"LFPS, one thread, at 128K, all layers, against `full` | {measured}" in table
    assert f"{measured} | ≥ 22.8{TIMES} {verdict} |" in table


def test_bookkeeping_at_equal_candidate_counts() -> None:
    short = bookkept("lfps, alpha 0.2", 8192, 0.04, 10, 10)  # 328 candidates, 20 µs
    rows = [
        short,
        bookkept("lfps, alpha 0.2", 131072, 0.02, 100, 100),  # 2,621 candidates
        bookkept("lfps, alpha 4.0", 131072, 328 / 131072 / 2, 10, 5),
        bookkept("lfps, alpha 1.5", 131072, 328 / 131072 * 2, 20, 20),
    ]
    # A third of the way from 15 µs at half the count to 40 µs at twice the count.
    assert lfps_bookkeeping(rows) == pytest.approx((15 + 25 / 3) / 20, rel=0.01)
    # Only more candidates were measured: scaled down.
    assert lfps_bookkeeping(rows[:2]) == pytest.approx(200 / 8 / 20, rel=0.01)
    assert lfps_bookkeeping([short]) is None
    assert lfps_bookkeeping(rows[1:]) is None
