"""Markdown of perf/results/hot-rows.json and ruler-gpu.json: speed and answers on a GPU."""

from __future__ import annotations

from typing import Any

from perf.tables.markdown import TIMES, Columns, Row, median, table
from perf.tables.tables import machine_line

_OURS = "offload"


def hot_rows_table(result: dict[str, Any]) -> str:
    """Steps with hot rows compared with those of the same policy without."""
    rows = [row for row in result["rows"] if row["engine"].startswith(_OURS)]
    graphs = {
        (row["batch_size"], row["kv_len"]): row["milliseconds"]
        for row in result["rows"]
        if not row["engine"].startswith(_OURS)
    }

    def against_graph(row: Row) -> str:
        of_graph = graphs.get((row["batch_size"], row["kv_len"]))
        return (
            "does not fit" if of_graph is None else f"{of_graph / row['milliseconds']:.2f}{TIMES}"
        )

    columns: Columns = {
        "sequences": lambda row: f"{row['batch_size']} {TIMES} {row['kv_len']:,}",
        "CPU threads": "{threads}",
        "policy": lambda row: f"`{row.get('label', row['policy'])}`",
        "KV heads": lambda row: ", ".join(f"{n} {place}" for place, n in row["places"].items()),
        "ms a step": median("milliseconds", ".2f"),
        "faster than all on the GPU": against_graph,
    }
    title = (
        f"{result['settings']['shape']} shapes, {result['settings']['dtype']}, budget 1,024, at "
        "most 24 GiB of the GPU, made keys (two layers' of them, repeated). All on the GPU: one "
        "graph with the whole KV cache there, whatever it takes."
    )
    return "\n\n".join([title, table(columns, rows), machine_line(result["machine"])])


def ruler_roles_table(result: dict[str, Any]) -> str:
    """What roles of heads keep of RULER, compared with policies without roles."""
    rows = [row for row in result["rows"] if row["part"] == "roles"]
    columns: Columns = {
        "model": "`{model}`",
        "context": "{length:,}",
        "policy": lambda row: f"`{row['policy']}`" + (f", {row['roles']}" if row["roles"] else ""),
        "score": lambda row: f"{100 * row['score']:.1f}",
        "against `full`": _difference,
        "attended tokens": "{attended_tokens:,.0f}",
    }
    title = (
        f"RULER, all 11 tasks, {rows[0]['prompts']} prompts of each context, budget a tenth; the "
        "mean over tasks in which full attention scores. In brackets 95 %."
    )
    return "\n\n".join(
        [title, table(columns, rows), machine_line(result["machine"], spreads=False)]
    )


def ruler_ahead_table(result: dict[str, Any]) -> str:
    """Answers with hot rows compared with those of the same policy asked with the true query."""
    rows = [row for row in result["rows"] if row["part"] == "ahead"]
    columns: Columns = {
        "model": "{model}",
        "context": lambda row: f"{row['length']:,}" if row["length"] else "both",
        "prompts": "{prompts}",
        "full attention": lambda row: f"{100 * row['full_score']:.1f}",
        "true query": lambda row: f"{100 * row['exact_score']:.1f}",
        "hot rows": lambda row: f"{100 * row['score']:.1f}",
        "difference": _difference,
    }
    title = (
        "RULER, all 11 tasks, `lychee_cluster`, budget a tenth, decoded on an NVIDIA H200. In "
        "brackets 95 %."
    )
    return "\n\n".join([title, table(columns, rows)])


def _difference(row: Row) -> str:
    low, high = (100 * x for x in row["interval"])
    return f"{100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
