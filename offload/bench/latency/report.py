"""What follows from latency measurements, and the tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload.bench.latency.measure import PHASES, LatencyMeasurement

_TIMES = "\N{MULTIPLICATION SIGN}"


def latency_rows(measurements: Sequence[LatencyMeasurement]) -> list[dict[str, Any]]:
    """Each measurement as plain values, with what follows from it and others of the same run.

    Beside its fields: yardstick_share; all_layers_microseconds, the mean over all layers of the
    model, with its dense ones at the time of `full`; speedup_over_full and _exact_topk at the same
    length and threads; over the fewest threads measured, thread_speedup, and thread_efficiency:
    that speedup over the ratio of the gather bandwidths; growth of the time over the shortest
    context. None where the other measurement is missing.
    """
    by_key = {(m.policy, m.kv_len, m.num_threads): m for m in measurements}
    fewest = min(m.num_threads for m in measurements)
    shortest = min(m.kv_len for m in measurements)

    def row(m: LatencyMeasurement) -> dict[str, Any]:
        def ratio(policy: str, kv_len: int, threads: int) -> float | None:
            other = by_key.get((policy, kv_len, threads))
            return None if other is None else other.microseconds / m.microseconds

        over_full = ratio("full", m.kv_len, m.num_threads)
        all_layers = None
        if over_full is not None:
            full = by_key["full", m.kv_len, m.num_threads].microseconds
            all_layers = m.dense_share * full + (1 - m.dense_share) * m.microseconds
        efficiency = speedup = ratio(m.policy, m.kv_len, fewest)
        if speedup is not None:
            base = by_key[m.policy, m.kv_len, fewest]
            efficiency = speedup / (m.gather_bandwidth / base.gather_bandwidth)
        shorter = ratio(m.policy, shortest, m.num_threads)
        return asdict(m) | {
            "yardstick_share": m.yardstick_share,
            "all_layers_microseconds": all_layers,
            "speedup_over_full": over_full,
            "speedup_over_exact_topk": ratio("exact_topk", m.kv_len, m.num_threads),
            "thread_speedup": speedup,
            "thread_efficiency": efficiency,
            "growth": None if shorter is None else 1 / shorter,
        }

    return [row(m) for m in measurements]


def threads_title(num_threads: int) -> str:
    """What a block of the table is called."""
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def table_cells(
    rows: Sequence[dict[str, Any]], num_threads: int, *, wide: bool = True
) -> list[list[str]]:
    """Header and lines of one number of threads, sorted by context; times in microseconds.

    Args:
        wide: with all columns; else with seven, of which the last is what the policy keeps, or,
            beside a block of fewer threads that says so already, the speedup over that.
    """
    fewest = min(row["num_threads"] for row in rows)
    header = ["policy", "context", "µs", "over full", "over top-k", *PHASES, "other", "MB", "GB/s"]
    header += ["memory", "scored", "overlap", "mass", "growth"]
    if num_threads != fewest:
        header += [f"vs {threads_title(fewest)}", "of memory's"]
    chosen = [row for row in rows if row["num_threads"] == num_threads]
    lines = []
    for row in sorted(chosen, key=lambda row: int(row["kv_len"])):
        spread = (row["microseconds_p90"] - row["microseconds_p10"]) / 2 / row["microseconds"]
        line = [
            row["policy"],
            f"{row['kv_len']:,}",
            f"{row['microseconds']:,.0f} ±{spread:.0%}",
            _times(row["speedup_over_full"]),
            _times(row["speedup_over_exact_topk"]),
            *(f"{row['phases'][phase]:,.0f}" for phase in [*PHASES, "other"]),
            f"{row['bytes_touched'] / 1e6:,.1f}",
            f"{row['bandwidth'] / 1e9:.1f}",
            f"{row['yardstick_share']:.0%}",
            f"{row['candidate_share']:.2%}" if row["candidate_share"] < 1 else "all",
            _share(row["top_overlap"]),
            _share(row["mass_kept"]),
            _times(row["growth"]),
        ]
        if num_threads != fewest:
            line += [_times(row["thread_speedup"]), _share(row["thread_efficiency"])]
        lines.append(line)
    if not wide:
        names = ["policy", "context", "µs", "over full", "over top-k", "memory"]
        names.append("mass" if num_threads == fewest else f"vs {threads_title(fewest)}")
        columns = [header.index(name) for name in names]
        return [[cells[i] for i in columns] for cells in (header, *lines)]
    return [header, *lines]


CAPTION = (
    "µs: median per token and layer (of the layers that are not dense), ± half of p10 to p90. "
    "over full, over top-k: how many times faster than they. memory: of the bandwidth measured in "
    "this run (sequential for full and scanning policies, row gather for others). mass: attention "
    "kept, sinks left out."
)
WIDE_CAPTION = (
    "predict … other: where the time goes. MB, GB/s: read and written. scored: keys scored "
    "exactly. overlap: of the choice with the true top-k. growth: over the shortest context. of "
    "memory's: speedup over that of gathers."
)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.{1 if ratio < 100 else 0}f}{_TIMES}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
