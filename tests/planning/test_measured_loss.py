"""The table of measured losses: what it finds, and a file that is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.planning.measured_loss import HOT_ROWS, TRUE_QUERY, Loss, LossTable, measured_losses

TIDAL = ("tidal_decode", {"budget_tokens": 1024})


def row(**changed: Any) -> dict[str, Any]:
    return {
        "policy": "tidal_decode",
        "options": {"budget_tokens": 1024},
        "where": HOT_ROWS,
        "context": 8192,
        "points": -0.5,
        "interval": [-1.5, 0.5],
        "prompts": 160,
    } | changed


def table(tmp_path: Path, *rows: dict[str, Any]) -> LossTable:
    path = tmp_path / "losses.json"
    path.write_text(json.dumps({"model": "m", "losses": rows}), "utf-8")
    return LossTable.load(path)


@pytest.mark.parametrize(
    ("context", "found"),
    [(4096, 8192), (8192, 8192), (14000, 8192), (15000, 24576), (10**6, 24576)],
)
def test_the_nearest_context(tmp_path: Path, context: int, found: int) -> None:
    losses = table(tmp_path, row(context=24576), row())
    loss = losses.find(*TIDAL, HOT_ROWS, context)
    assert loss is not None
    assert loss.context == found


@pytest.mark.parametrize(("budget", "found"), [(256, 512), (1023, 512), (1024, 1024), (4096, 1024)])
def test_the_nearest_budget(tmp_path: Path, budget: int, found: int) -> None:
    losses = table(tmp_path, row(), row(options={"budget_tokens": 512}))
    loss = losses.find("tidal_decode", {"budget_tokens": budget}, HOT_ROWS, 8192)
    assert loss is not None
    assert loss.options["budget_tokens"] == found
    assert (f"with budget {found:,}" in losses.told(loss, budget, "m")) == (found != budget)


def test_what_was_not_measured(tmp_path: Path) -> None:
    losses = table(tmp_path, row())
    assert losses.find(*TIDAL, TRUE_QUERY, 8192) is None
    assert losses.find("quest", TIDAL[1], HOT_ROWS, 8192) is None
    assert losses.find("tidal_decode", {**TIDAL[1], "sink_tokens": 8}, HOT_ROWS, 8192) is None
    assert losses.told(None, 1024, "m") == "loss of hard look-ups not measured"


@pytest.mark.parametrize(
    ("points", "half_width", "end"),
    [
        (-0.4, 1.1, "-0.4 ± 1.1 points of full attention"),
        (0.2, 6.4, "+0.2 ± 6.4 points of full attention, too wide to show that nothing is lost"),
        (-2.0, 1.0, "-2.0 ± 1.0 points of full attention, which shows a loss"),
    ],
)
def test_a_clause(tmp_path: Path, points: float, half_width: float, end: str) -> None:
    interval = [points - half_width, points + half_width]
    losses = table(tmp_path, row(points=points, interval=interval, context=24000))
    loss = losses.losses[0]
    assert losses.told(loss, 1024, "m") == f"hard look-ups at 24,000 tokens: {end}"
    assert "(measured on SmolLM2-135M)" in losses.told(loss, 1024, "")


def test_an_interval_shows_something_up_to_its_limit() -> None:
    loss = Loss(**row(interval=(-2.0, 1.0)))
    assert loss.shows
    assert loss.is_small
    assert not Loss(**row(interval=(-2.0, 1.1))).shows
    assert not Loss(**row(points=-1.1)).is_small


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"losses": []},
        {"model": "m", "losses": [{"policy": "lfps"}]},
        {"model": "m", "losses": 3},
    ],
)
def test_a_damaged_table_names_its_file(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "losses.json"
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(ValueError, match=r"measured losses .*losses\.json is damaged"):
        LossTable.load(path)
    with pytest.raises(FileNotFoundError, match="no table of measured losses"):
        LossTable.load(tmp_path / "none.json")


def test_the_packaged_table() -> None:
    losses = measured_losses()
    assert losses.model == "smollm2-135m-instruct-32k"
    loss = losses.find("sketch", TIDAL[1] | {"estimate_clusters": 128}, HOT_ROWS, 131072)
    assert loss is not None
    assert (loss.context, loss.prompts, loss.shows, loss.is_small) == (24576, 462, True, True)
