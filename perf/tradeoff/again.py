"""Some policies measured again, in place of their rows in a table of all.

`python -m perf.tradeoff.again TABLE.json NEWER.json`, both written by `perf.bench_tradeoff`. Where
one policy has changed, the others' rows stay as they are: NEWER has full attention, too, which must
have about the same score of the same prompts (`--samples-of TABLE.json`; what a GPU has read is not
the same to the bit), and whose steps must have taken about as long. Differences to it stay those of
its own run. The table says whose machine and commit each row is of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from offload.bench.eval.summary import FULL
from perf.results_file import write_results

Row = dict[str, Any]
Result = dict[str, Any]
_SAME = ("model", "dtype", "text")
_COUNTS = ("counting_tasks", "fewest_samples", "seed", "reads_on")
_STEPS = ("threads", "steps")
_POINTS = 0.02  # that full attention's score may differ by


def with_newer(table: Result, newer: Result, tolerance: float = 0.05) -> Result:
    """`table` with the rows of `newer` in place of those of the same policies.

    Raises:
        ValueError: the two cannot stand in one table.
    """
    for name in _SAME:
        _check_equal(name, table["settings"][name], newer["settings"][name])
    policies = newer["settings"]["policies"]
    changed = [label for label in policies if label != FULL]
    if missing := [label for label in changed if label not in table["settings"]["policies"]]:
        raise ValueError(f"the table has no rows of {', '.join(missing)}")
    for row in newer["rows"]:
        if row.get("label") == FULL:
            _check_full(row, _same_place(table["rows"], row), tolerance)
    rows = [dict(row) for row in table["rows"]]
    for row in newer["rows"]:
        if row["part"] == "cells":
            found = _same_place(rows, row, "task")
            if not found["counts"]:
                continue
            for name in ("scores", "attended_tokens"):
                found[name] = found[name] | {x: row[name][x] for x in changed}
        elif row["label"] in changed:
            found = _same_place(rows, row)
            found.clear()
            found.update(row)
    settings = dict(table["settings"])
    settings["policies"] = settings["policies"] | {label: policies[label] for label in changed}
    names = ", ".join(dict.fromkeys(label.split(" ")[0] for label in changed))
    of_newer = {f"{part}: {names}": x for part, x in newer["settings"]["machines"].items()}
    settings["machines"] = settings["machines"] | of_newer
    return {**table, "settings": settings, "rows": rows}


def _same_place(rows: list[Row], wanted: Row, *more: str) -> Row:
    names = ("part", "device", "length", *(more or ("label",)))
    for row in rows:
        if all(row.get(name) == wanted.get(name) for name in names):
            return row
    raise ValueError(f"the table has no row of {[wanted.get(name) for name in names]}")


def _check_full(now: Row, then: Row, tolerance: float) -> None:
    place = f"full attention at {now['length']:,} tokens"
    for name in _COUNTS if now["part"] == "quality" else _STEPS:
        _check_equal(f"{name} of {place}", then[name], now[name])
    if now["part"] == "quality":
        scores = [row["score"] or 0.0 for row in (then, now)]
        if abs(scores[1] - scores[0]) > _POINTS:
            raise ValueError(f"the score of {place} is {scores[0]:.3f}, and {scores[1]:.3f} now")
    if now["part"] == "speed":
        ratio = now["milliseconds"] / then["milliseconds"]
        if abs(ratio - 1.0) > tolerance:
            raise ValueError(
                f"{place} took {ratio:.3f} times as long as in the table; the machines may be "
                "unlike: measure all policies again, or raise --tolerance and say so"
            )


def _check_equal(name: str, then: Any, now: Any) -> None:
    if then != now:
        raise ValueError(f"{name}: {then} in the table, {now} now")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("newer", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of full attention's time")
    options = parser.parse_args()
    table, newer = (json.loads(path.read_text("utf-8")) for path in (options.table, options.newer))
    found = with_newer(table, newer, options.tolerance)
    of_table = {name: found[name] for name in ("machine", "settings", "rows")}
    print(write_results(options.table.stem, **of_table, folder=options.table.parent))


if __name__ == "__main__":
    main()
