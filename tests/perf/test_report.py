"""The tables of README and docs come from perf/results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cases.machine import MACHINE

from offload.planning.measured_loss import HOT_ROWS, PACKAGED, TRUE_QUERY
from perf import plots, report, results_file
from perf.results_file import read_results, write_results
from perf.tables.loss_tables import loss_rows, packaged_losses

pytestmark = pytest.mark.docs


SPEEDS = {
    "settings": {"model": "smollm2-135m-instruct"},
    "rows": [{"engine": "offload exact_topk", "context": 512, "decode_tokens_per_second": 71.2}],
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    return tmp_path


def test_results_survive_a_round_trip(results: Path) -> None:
    assert read_results("decode") is None
    write_results("decode", machine=MACHINE, settings={"threads": 2}, rows=[{"context": 1}])
    result = read_results("decode")
    assert result is not None
    assert result["machine"] == MACHINE
    assert result["rows"] == [{"context": 1}]


def test_sections_are_replaced_and_the_rest_is_kept(results: Path) -> None:
    text = "before\n<!-- perf:policy-speed -->\nold\n<!-- /perf:policy-speed -->\nafter\n"
    assert report.NOT_MEASURED in report.render(text)
    write_results("decode-policies", machine=MACHINE, **SPEEDS)
    rendered = report.render(text)
    assert rendered.startswith("before\n<!-- perf:policy-speed -->\n")
    assert rendered.endswith("<!-- /perf:policy-speed -->\nafter\n")
    assert "| `exact_topk` | 71.2 |" in rendered
    assert "old" not in rendered
    assert report.render(rendered) == rendered


def test_gpu_tables_say_nothing_until_one_was_measured(results: Path) -> None:
    empty = "<!-- perf:gpu-decode -->\n\n<!-- /perf:gpu-decode -->"
    assert report.render("<!-- perf:gpu-decode -->\nold\n<!-- /perf:gpu-decode -->") == empty
    assert report.render(empty) == empty


def test_unknown_sections_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown section 'decoding'; available: decode"):
        report.render("<!-- perf:decoding -->\n<!-- /perf:decoding -->")


def test_documents_match_the_results() -> None:
    assert report.outdated() == [], "run: make report"


def test_plots_match_the_results() -> None:
    assert report.plots(outdated_only=True) == {}, "run: make report"


def test_the_time_plot_belongs_to_its_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    gpu = {part: read_results(f"gpu-{part}") for part in ("decode", "peers")}
    cpu = read_results("decode")
    path = tmp_path / "time.svg"
    assert cpu is not None
    assert not plots.is_current(path, plots.time_results(gpu, cpu))
    plots.plot_time_per_token(gpu, cpu, path)
    assert plots.is_current(path, plots.time_results(gpu, cpu))
    faster = copy.deepcopy(gpu)
    faster["decode"]["rows"][0]["milliseconds"] /= 2
    assert not plots.is_current(path, plots.time_results(faster, cpu))


def test_the_plot_is_the_same_for_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    rooms = read_results("gpu-rooms")
    assert rooms is not None
    for name in ("one.svg", "two.svg"):
        plots.plot_rooms(rooms, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def losses(*, hot_rows: bool = False, difference: float = -0.02, prompts: int = 160) -> Any:
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
    rows = loss_rows({"hard-ruler": losses()})
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
    assert loss_rows({"hard-ruler": losses(hot_rows=True)})[0]["where"] == HOT_ROWS


@pytest.mark.parametrize("more", [160, 320])
def test_more_prompts_stand(more: int) -> None:
    results = {"a": losses(prompts=more), "b": losses(difference=0.01, prompts=200)}
    assert loss_rows(results)[0]["points"] == (1.0 if more < 200 else -2.0)


def test_one_table_is_of_one_model() -> None:
    other = copy.deepcopy(losses())
    other["settings"]["options"]["model"] = "n"
    with pytest.raises(ValueError, match=r"are of 2 models"):
        packaged_losses({"hard-ruler": losses(), "hard-ruler-n": other})
    assert json.loads(packaged_losses({"hard-ruler": losses()}))["model"] == "m"
