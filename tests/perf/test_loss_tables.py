"""The table that `auto` chooses by is what perf/results gives."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from offload.planning.measured_loss import HOT_ROWS, PACKAGED, TRUE_QUERY
from perf import report
from perf.tables.loss_tables import loss_rows, loss_table, packaged_losses


def result(*, hot_rows: bool = False, difference: float = -0.02, prompts: int = 160) -> Any:
    summary = {"part": "summary", "length": 24576, "prompts": prompts, "interval": [-0.05, 0.011]}
    policies = {
        "full": {},
        "lychee_cluster 1024": {"budget_tokens": 1024, "estimate_clusters": 0},
        "lychee_cluster 1024 estimate_clusters=64": {
            "budget_tokens": 1024,
            "estimate_clusters": 64,
        },
    }
    return {
        "machine": {"gpus": ["A GPU"], "cpus_usable": 4, "commit": "0" * 40, "date": "2026-01-01"},
        "settings": {
            "options": {
                "model": "m",
                "hot_rows": hot_rows,
                "policies": policies,
                "tasks": ["vt", "fwe"],
            }
        },
        "rows": [
            *({**summary, "policy": name, "difference": difference} for name in policies),
            {"part": "cells", "task": "vt"},
        ],
    }


def test_the_packaged_table_is_what_the_results_give() -> None:
    results = report._hard_results()
    assert {"hard-ruler-ahead", "hard-ruler-cpu", "hard-ruler-found"} <= set(results)
    assert PACKAGED.read_text("utf-8") == packaged_losses(results), "run: make report"


def test_rows_of_losses() -> None:
    rows = loss_rows({"hard-ruler": result()})
    assert rows[1] == {
        "policy": "lychee_cluster",
        "options": {"budget_tokens": 1024, "estimate_clusters": 64},
        "where": TRUE_QUERY,
        "context": 24576,
        "points": -2.0,
        "interval": [-5.0, 1.1],
        "prompts": 160,
    }
    assert [row["options"] for row in rows[:1]] == [{"budget_tokens": 1024}]
    assert len(rows) == 2
    assert loss_rows({"hard-ruler": result(hot_rows=True)})[0]["where"] == HOT_ROWS


@pytest.mark.parametrize("more", [160, 320])
def test_more_prompts_stand(more: int) -> None:
    results = {"a": result(prompts=more), "b": result(difference=0.01, prompts=200)}
    assert loss_rows(results)[0]["points"] == (1.0 if more < 200 else -2.0)


def test_one_table_is_of_one_model() -> None:
    other = copy.deepcopy(result())
    other["settings"]["options"]["model"] = "n"
    with pytest.raises(ValueError, match=r"are of 2 models"):
        packaged_losses({"hard-ruler": result(), "hard-ruler-n": other})
    assert json.loads(packaged_losses({"hard-ruler": result()}))["model"] == "m"


def test_the_table_for_readers() -> None:
    shown = loss_table({"hard-ruler": result()})
    assert (
        "| `lychee_cluster` estimate_clusters=64 | 1,024 | true query | 24,576 | -2.0 | "
        "-5.0 … +1.1 | 160 |"
    ) in shown
    assert "*true query: 1 of 2 tasks, A GPU, 4 CPU cores, commit 000000000000" in shown
