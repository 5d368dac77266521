"""RULER within a bound on each sequence: the table of perf/results/bounded-ruler.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.bench.eval.bounds import Bound
from offload.bench.eval.intervals import Values, score_interval
from perf.tables.markdown import markdown_table
from perf.tables.tables import machine_line

Tasks = dict[str, dict[str, Any]]  # rows by task
_DASH = "\N{EN DASH}"


def bounded_table(result: dict[str, Any]) -> str:
    """Policies with all keys and values, and within each bound; mean over tasks.

    Tasks of which full attention answers nothing with all keys and values count nowhere, as in
    `offload eval`. The difference is to the same policy's with all of them.
    """
    settings = result["settings"]
    rows: dict[str, Tasks] = {}
    for row in result["rows"]:
        rows.setdefault(row["policy"], {})[row["task"]] = row
    tasks = [task for task, row in rows["full"].items() if any(row["score"])]
    if not tasks:
        return "*Full attention answered nothing, so no bound could lose anything.*"
    # In older results "fitted" is the eviction that labels leave out.
    bounds = [Bound(**bound) for bound in settings["bounds"]]
    lines = []
    for label in settings["policies"]:
        whole = rows[label]
        lines.append([label, "all", _DASH, *_cells(whole, whole, tasks)])
        for bound in bounds:
            found = rows.get(bound.label(label)) or rows[f"{label} host={bound.share:g}"]
            cells = _cells(found, whole, tasks)
            lines.append([label, f"{bound.share:.0%}", bound.eviction, *cells])
    header = ["policy", "of all bytes", "condensed by", "RULER", "to all bytes"]
    header += ["95 % interval", "slots", "condensed", "attended", "reading, to all bytes"]
    if all(cells[-1] == _DASH for cells in lines):  # older results do not say it
        header, lines = header[:-1], [cells[:-1] for cells in lines]
    counts = sorted(len(row["score"]) for row in rows["full"].values())
    title = (
        f"Right answers of {settings['model']}, per cent, mean over {', '.join(tasks)}; "
        f"{' to '.join(dict.fromkeys((str(counts[0]), str(counts[-1]))))} prompts of each task, "
        f"{settings['length']:,} tokens; pages of {settings['page_tokens']}."
    )
    machine = machine_line(result["machine"], spreads=False)
    return "\n\n".join([title, markdown_table(header, lines), machine])


def _cells(found: Tasks, whole: Tasks, tasks: list[str]) -> list[str]:
    scores, wholes = ([_values(of[task], "score") for task in tasks] for of in (found, whole))
    mean = 100 * float(np.mean([x.mean() for x in scores]))
    counts = [_mean(found, tasks, name) for name in ("slots", "condensed_tokens")]
    attended = _mean(found, tasks, "attended_tokens")
    if found is whole:
        return [f"{mean:.1f}", _DASH, _DASH, *counts, attended, _DASH]
    differences: list[Values] = [x - y for x, y in zip(scores, wholes, strict=True)]
    change = 100 * float(np.mean([x.mean() for x in differences]))
    interval = score_interval(differences)
    shown = _DASH if interval is None else " … ".join(f"{100 * x:+.1f}" for x in interval)
    reading = _reading(found, whole, tasks)
    return [f"{mean:.1f}", f"{change:+.1f}", shown, *counts, attended, reading]


def _reading(found: Tasks, whole: Tasks, tasks: list[str]) -> str:
    """Of prompts, to the time that it takes without a bound."""
    seconds, of_whole = (
        [x for task in tasks for x in of[task].get("prefill_seconds", [None])]
        for of in (found, whole)
    )
    is_known = None not in seconds and None not in of_whole  # older results do not say it
    return f"{sum(seconds) / sum(of_whole):.2f} x" if is_known else _DASH


def _values(row: dict[str, Any], name: str) -> Values:
    return np.array(row[name], np.float64)


def _mean(found: Tasks, tasks: list[str], name: str) -> str:
    known = [x for task in tasks for x in found[task][name] if x is not None]
    return f"{np.mean(known):,.0f}" if known else _DASH
