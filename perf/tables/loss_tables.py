"""What policies lose of hard look-ups, of perf/results/hard-ruler*.json: the table that `auto`
chooses by, for the package and for readers."""

from __future__ import annotations

import json
from typing import Any

from offload.planning.measured_loss import HOT_ROWS, TRUE_QUERY
from perf.tables.gpu_tables import Results
from perf.tables.markdown import Columns, Row, table


def loss_rows(results: Results) -> list[Row]:
    """A row of `offload.planning.measured_loss.Loss` for each policy, place and context.

    Measured twice, that of more prompts stands.
    """
    found: dict[tuple[str, str, int], Row] = {}
    for result in results.values():
        measured = result["settings"]["options"]
        for row in result["rows"]:
            if row["part"] != "summary" or row["policy"] == "full":
                continue
            where = _where(measured)
            name, _, *changed = row["policy"].split()
            options = measured["policies"][row["policy"]]
            names = ["budget_tokens", *(option.partition("=")[0] for option in changed)]
            loss = {
                "policy": name,
                "options": {option: options[option] for option in names},
                "where": where,
                "context": row["length"],
                "points": _points(row["difference"]),
                "interval": [_points(bound) for bound in row["interval"]],
                "prompts": row["prompts"],
            }
            key = row["policy"], where, row["length"]
            if key not in found or found[key]["prompts"] < loss["prompts"]:
                found[key] = loss
    return sorted(found.values(), key=lambda loss: (loss["where"], loss["context"]))


def packaged_losses(results: Results) -> str:
    """What offload/planning/measured_loss.json has to be.

    Raises:
        ValueError: results of more than one model.
    """
    models = {result["settings"]["options"]["model"] for result in results.values()}
    if len(models) != 1:
        raise ValueError(
            f"perf/results/hard-ruler*.json are of {len(models)} models ({', '.join(models)}), but "
            "one table is of one model"
        )
    document = {
        "generated": f"by perf/report.py from {', '.join(f'{name}.json' for name in results)}",
        "model": models.pop(),
        "losses": loss_rows(results),
    }
    return json.dumps(document, indent=1) + "\n"


def loss_table(results: Results) -> str:
    """The same for readers."""
    columns: Columns = {
        "policy": _named,
        "budget": lambda row: f"{row['options']['budget_tokens']:,}",
        "where": "{where}",
        "context": "{context:,}",
        "points": "{points:+.1f}",
        "95 % interval": lambda row: " … ".join(f"{bound:+.1f}" for bound in row["interval"]),
        "prompts": "{prompts}",
    }
    lines = [_run_line(name, result) for name, result in results.items()]
    return "\n\n".join([table(columns, loss_rows(results)), *lines])


def _run_line(name: str, result: dict[str, Any]) -> str:
    """Which run it was: `machine_line` needs a record that a run ended early does not leave."""
    options, machine = result["settings"]["options"], result["machine"]
    tasks = {row["task"] for row in result["rows"] if row["part"] == "cells"}
    return (
        f"*{_where(options)}: {len(tasks)} of {len(options['tasks'])} tasks, "
        f"{', '.join(machine['gpus'])}, {machine['cpus_usable']} CPU cores, commit "
        f"{machine['commit'][:12]}, {machine['date']} (`perf/results/{name}.json`).*"
    )


def _where(options: dict[str, Any]) -> str:
    return HOT_ROWS if options["hot_rows"] else TRUE_QUERY


def _named(row: Row) -> str:
    options = [f"{k}={v}" for k, v in row["options"].items() if k != "budget_tokens"]
    return " ".join([f"`{row['policy']}`", *options])


def _points(share: float) -> float:
    return round(100 * share, 2)
