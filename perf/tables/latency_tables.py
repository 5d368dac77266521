"""Markdown of perf/results/latency.json: policies by context, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from perf.tables.markdown import (
    TIMES,
    Columns,
    Row,
    known,
    median,
    policy_options_note,
    table,
    tokens,
)
from perf.tables.tables import machine_line

PHASES = ("predict", "score", "select", "attend", "update", "other")


def latency_table(result: dict[str, Any]) -> str:
    """Time of every policy at every context, a table per number of threads."""
    rows, settings = _main_rows(result), result["settings"]
    contexts = sorted({row["kv_len"] for row in rows})
    at = f"at {tokens(contexts[-1])}"
    parts = [
        f"One decode step of one layer of {settings['shape']}, {settings['dtype']}, batch "
        f"{settings['batch_size']}: µs per token "
        "and layer by context, of the layers that select. All layers, those that a policy leaves "
        "dense included, are over `full` as “all layers” says. Keys and queries have the structure "
        "of real attention; policies take turns, caches are cleared between turns, medians of "
        f"{settings['repeats']} steps, every output checked against a reference. "
        f"{policy_options_note(settings['budget_tokens'])}"
    ]
    for num_threads in _threads(rows):
        of_block = [row for row in rows if row["num_threads"] == num_threads]
        time = {(row["policy"], row["kv_len"]): row["microseconds"] for row in of_block}
        full = time.get(("full", contexts[-1]))
        sequential, gather = (
            of_block[-1][f"{kind}_bandwidth"] / 1e9 for kind in ("sequential", "gather")
        )
        columns: Columns = {
            "policy": "`{policy}`",
            **{tokens(n): partial(_time_at, time, n) for n in contexts},
            f"all layers over full {at}": partial(_all_layers_over, full),
            "those that select": lambda row: _times(row["speedup_over_full"]),
            "over top-k": lambda row: _times(row["speedup_over_exact_topk"]),
            "scored": lambda r: (
                "all" if r["candidate_share"] == 1 else f"{r['candidate_share']:.2%}"
            ),
            "attended": "{attended_tokens:,.0f}",
            "mass kept": "{mass_kept:.1%}",
            "of memory": "{yardstick_share:.0%}",
        }
        last = {row["policy"]: row for row in of_block if row["kv_len"] == contexts[-1]}
        parts += [
            f"**{_title(num_threads)}** (memory {sequential:.1f} GB/s in sequence, {gather:.1f} by "
            "rows)",
            table(columns, [last[policy] for policy in _policies(of_block)]),
        ]
    return "\n\n".join([*parts, machine_line(result["machine"])])


def latency_phases_table(result: dict[str, Any]) -> str:
    """Where the time of the deepest context goes, on one thread."""
    rows = _main_rows(result)
    deepest, threads = max(row["kv_len"] for row in rows), _threads(rows)[0]
    title = (
        f"The same at {deepest:,} tokens on {_title(threads)}: µs of each part, MB read and "
        "written, GB/s, overlap with the true top-k, seconds to build the policy's state of a "
        "layer, and its size as a share of the keys and values."
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "µs": median("microseconds", ",.0f"),
        **{phase: f"{{phases[{phase}]:,.0f}}" for phase in PHASES},
        "MB": lambda row: f"{row['bytes_touched'] / 1e6:,.1f}",
        "GB/s": lambda row: f"{row['bandwidth'] / 1e9:.1f}",
        "overlap": known("top_overlap", ".0%"),
        "build s": "{build_seconds:.2f}",
        "state": "{state_share:.1%}",
    }
    shown = [row for row in rows if (row["kv_len"], row["num_threads"]) == (deepest, threads)]
    return "\n\n".join([title, table(columns, shown)])


def _main_rows(result: dict[str, Any]) -> list[Row]:
    """Without LFPS at other alphas, which older results have."""
    return [row for row in result["rows"] if ", alpha" not in row["policy"]]


def _threads(rows: Sequence[Row]) -> list[int]:
    return sorted({row["num_threads"] for row in rows})


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _title(num_threads: int) -> str:
    return "one thread" if num_threads == 1 else f"{num_threads} threads"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.{1 if ratio < 100 else 0}f}{TIMES}"


def _time_at(times: Mapping[tuple[str, int], float], kv_len: int, row: Row) -> str:
    return f"{times[row['policy'], kv_len]:,.0f}"


def _all_layers_over(full: float | None, row: Row) -> str:
    return "" if full is None else _times(full / row["all_layers_microseconds"])
