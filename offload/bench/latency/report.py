"""What follows from latency measurements, and the tables of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.bench.latency.measure import Row

_TIMES = "\N{MULTIPLICATION SIGN}"


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows of `measure_latency`, each with what follows from it and others of the same run.

    Beside its values: all_layers_microseconds, the mean over all layers of the model, with its
    dense ones at the time of `full`; speedup_over_full and _exact_topk at the same length and
    threads; over the fewest threads measured, thread_speedup, and thread_efficiency: that speedup
    over the ratio of the gather bandwidths; growth of the time over the shortest context. None
    where the other row is missing.
    """
    by_key = {(row["policy"], row["kv_len"], row["num_threads"]): row for row in rows}
    fewest = min(row["num_threads"] for row in rows)
    shortest = min(row["kv_len"] for row in rows)

    def more(row: Row) -> Row:
        name, kv_len, threads = row["policy"], row["kv_len"], row["num_threads"]

        def ratio(policy: str, kv_len: int, threads: int) -> float | None:
            other = by_key.get((policy, kv_len, threads))
            return None if other is None else other["microseconds"] / row["microseconds"]

        over_full = ratio("full", kv_len, threads)
        all_layers = None
        if over_full is not None:
            full, dense = by_key["full", kv_len, threads]["microseconds"], row["dense_share"]
            all_layers = dense * full + (1 - dense) * row["microseconds"]
        efficiency = speedup = ratio(name, kv_len, fewest)
        if speedup is not None:
            base = by_key[name, kv_len, fewest]
            efficiency = speedup / (row["gather_bandwidth"] / base["gather_bandwidth"])
        shorter = ratio(name, shortest, threads)
        return row | {
            "all_layers_microseconds": all_layers,
            "speedup_over_full": over_full,
            "speedup_over_exact_topk": ratio("exact_topk", kv_len, threads),
            "thread_speedup": speedup,
            "thread_efficiency": efficiency,
            "growth": None if shorter is None else 1 / shorter,
        }

    return [more(row) for row in rows]


def relative_spread(row: Row) -> float:
    """Half of p10 to p90 of a row's times, as a share of their median."""
    return float((row["microseconds_p90"] - row["microseconds_p10"]) / 2 / row["microseconds"])


def threads_title(num_threads: int) -> str:
    """What a block of the table is called."""
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def table_cells(rows: Sequence[Row], num_threads: int) -> list[list[str]]:
    """Header and lines of one number of threads, sorted by context; times in microseconds.

    Beside a block of fewer threads the last column is the speedup over that.
    """
    fewest = min(row["num_threads"] for row in rows)
    columns: dict[str, Callable[[Row], str]] = {
        "policy": lambda row: row["policy"],
        "context": lambda row: f"{row['kv_len']:,}",
        "µs": lambda row: f"{row['microseconds']:,.0f} ±{relative_spread(row):.0%}",
        "over full": lambda row: _times(row["speedup_over_full"]),
        "over top-k": lambda row: _times(row["speedup_over_exact_topk"]),
        "memory": lambda row: f"{row['yardstick_share']:.0%}",
    }
    if num_threads > fewest:
        columns[f"vs {threads_title(fewest)}"] = lambda row: _times(row["thread_speedup"])
    chosen = [row for row in rows if row["num_threads"] == num_threads]
    chosen.sort(key=lambda row: int(row["kv_len"]))
    return [list(columns), *([cell(row) for cell in columns.values()] for row in chosen)]


CAPTION = """\
µs: per token and layer that is not dense; median ± half of p10 to p90
over full, over top-k: how many times faster than full, than exact_topk
memory: of the bandwidth measured in this run; in sequence for full and
  policies that scan, by rows for others"""


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.{1 if ratio < 100 else 0}f}{_TIMES}"
