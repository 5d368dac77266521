"""Markdown of `perf.comparison`: `offload serve` beside other servers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from perf.tables.markdown import Columns, Row, table
from perf.tables.tables import machine_line

NOT_MEASURED = "*Not measured yet.*"


def one_client_table(result: dict[str, Any]) -> str:
    """One request at a time, by prompt."""
    rows = _of(result, "one client")
    columns: Columns = {
        "server": "{peer}",
        "prompt": "{prompt_tokens:,}",
        "first token": _seconds("ttft_s"),
        "tokens/s": _value("tokens_per_second", ".1f"),
        "peak PSS": _mib("peak_pss_bytes"),
        "peak RSS": _mib("peak_rss_bytes"),
    }
    return "\n\n".join([table(columns, _medians(rows)), _versions(result)])


def many_table(result: dict[str, Any]) -> str:
    """Many clients, and conversations that come back after others."""
    clients, conversations = _of(result, "clients"), _of(result, "conversations")
    many: Columns = {
        "server": "{peer}",
        "requests": "{clients} x {prompt_tokens:,} + {new_tokens}",
        "all done": lambda row: f"{row['seconds']:.1f} s" if "seconds" in row else row["outcome"],
        "first token": _seconds("ttft_s"),
        "the last one's": _seconds("ttft_max_s"),
        "peak PSS": _mib("peak_pss_bytes"),
    }
    back: Columns = {
        "server": "{peer}",
        "conversations": "{clients} x {prompt_tokens:,}",
        "first token": _seconds("ttft_s"),
        "when they come back": _seconds("ttft_s", -1),
        "peak PSS": _mib("peak_pss_bytes"),
    }
    tables = [(many, clients), (back, conversations)]
    found = [table(columns, _medians(rows)) for columns, rows in tables if rows]
    return "\n\n".join(found) or NOT_MEASURED


def limit_table(result: dict[str, Any]) -> str:
    """What each did with less memory than it would like."""
    rows = [row for row in result["rows"] if row["limit_bytes"] is not None]
    if not rows:
        return NOT_MEASURED
    columns: Columns = {
        "server": "{peer}",
        "scenario": "{scenario}, {prompt_tokens:,}",
        "limit": _mib("limit_bytes"),
        "told": lambda row: _mib("told_bytes")(row) or "no option",
        "outcome": "{outcome}",
        "answered": lambda row: f"{row.get('answered', 0)} of {row['clients'] * row['turns']}",
        "first token": _seconds("ttft_s"),
        "it said": lambda row: row["said"].replace("|", "\\|"),
    }
    return "\n\n".join([table(columns, rows), machine_line(result["machine"], spreads=False)])


def all_tables(result: dict[str, Any]) -> str:
    """What was measured, of one machine."""
    made = (one_client_table(result), many_table(result), limit_table(result))
    return "\n\n".join(x for x in made if x != NOT_MEASURED)


def gpu_table(result: dict[str, Any]) -> str:
    """One request, and conversations that come back, with so much of a GPU."""
    columns: Columns = {
        "server": "{peer}",
        "of the GPU": _gib("gpu_bytes"),
        "requests": "{clients} x {prompt_tokens:,} + {new_tokens}",
        "first token": _seconds("ttft_s"),
        "when they come back": lambda row: _seconds("ttft_s", -1)(row) if row["turns"] > 1 else "",
        "tokens/s of an answer": _value("tokens_per_second", ".1f"),
        "all done": lambda row: f"{row['seconds']:.1f} s" if "seconds" in row else row["outcome"],
        "peak of the GPU": _gib("peak_gpu_bytes"),
        "peak RSS": _gib("peak_rss_bytes"),
    }
    settings = result["settings"]
    known = [f"{name} {of}" for name, of in settings["versions"].items() if of]
    text = f"{settings['threads']} threads. Versions: {'; '.join(known)}."
    machine = machine_line(result["machine"], spreads=False)
    return "\n\n".join([table(columns, result["rows"]), text, machine])


def _of(result: dict[str, Any], scenario: str) -> list[Row]:
    """Rows of a scenario without a limit."""
    rows = result["rows"]
    return [x for x in rows if x["scenario"] == scenario and x["limit_bytes"] is None]


def _medians(rows: list[Row]) -> list[Row]:
    """A row for each server and prompt, from all rounds; the worst outcome counts."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["peer"], row["prompt_tokens"]), []).append(row)
    return [_median(of) for of in found.values()]


def _median(rounds: list[Row]) -> Row:
    bad = [x for x in rounds if x["outcome"] != "answers"]
    if bad:
        return bad[0]
    merged = dict(rounds[0])
    for name in ("seconds", "tokens_per_second", "peak_pss_bytes", "peak_rss_bytes"):
        merged[name] = statistics.median(x[name] for x in rounds)
    for name in ("ttft_s", "ttft_max_s"):
        merged[name] = [
            statistics.median(x) for x in zip(*(of[name] for of in rounds), strict=True)
        ]
    return merged


def _seconds(name: str, turn: int = 0) -> Callable[[Row], str]:
    """The cell of a turn's time; what happened instead where there is none."""

    def cell(row: Row) -> str:
        times = row.get(name)
        return f"{times[turn]:.2f} s" if times and times[turn] is not None else row["outcome"]

    return cell


def _value(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else format(row[name], form)


def _mib(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / 2**20:,.0f} MiB"


def _gib(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / 2**30:,.1f} GiB"


def _versions(result: dict[str, Any]) -> str:
    settings = result["settings"]
    known = [f"{name} {of}" for name, of in settings["versions"].items() if of]
    missing = [name for name, of in settings["versions"].items() if not of]
    text = f"{settings['threads']} threads, medians of {settings['rounds']} rounds in turns. "
    text += f"Versions: {'; '.join(known)}."
    if missing:
        text += f" Not installed where this was measured: {'; '.join(missing)}."
    return text + "\n\n" + machine_line(result["machine"], spreads=False)
