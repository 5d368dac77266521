"""`offload bench quality` on a tiny model: outputs and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from cases.slowly import slow_but
from typer.testing import CliRunner

from offload.bench.quality import output as quality_output
from offload.bench.quality.measure import QualityMeasurement
from offload.cli import app
from offload.cli.bench.options import option_values, policy_grid
from offload.policies import ExactTopK
from offload.policies.registry import available_policies

runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})


@pytest.fixture
def command(tiny_folders: dict[str, Path]) -> list[str]:
    """Few steps of a short text; the defaults' recent window is too long for that."""
    arguments = ["--context", "150", "--steps", "36", "--sample-every", "12", "--threads", "1"]
    arguments += ["--policy", "exact_topk", "--budget-tokens", "30", "--dtype", "float32"]
    arguments += ["--option", "recent_tokens=8", "--option", "dense_layers=1"]
    return ["bench", "quality", str(tiny_folders["llama"]), *arguments]


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_json(command: list[str]) -> None:
    bound = ["--host-share", "0.8", "--evictions", "fitted", "--page-tokens", "16"]
    result = runner.invoke(app, [*command, "--budget-tokens", "30,60", *bound, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["machine"]["isa"]
    settings = document["settings"]
    assert (settings["context"], settings["steps"], settings["sample_every"]) == (150, 36, 12)
    assert len(settings["text"]["sha256"]) == 64
    assert settings["bounds"] == [{"share": 0.8, "eviction": "fitted"}]
    full, small, large, bounded = document["rows"]
    assert [row["budget_tokens"] for row in (full, small, large)] == [None, 30, 60]
    assert set(full) == set(QualityMeasurement.__dataclass_fields__)
    assert full["kl"] == 0
    assert small["options"]["recent_tokens"] == 8
    assert small["mass_kept"] < large["mass_kept"] < full["mass_kept"] == pytest.approx(1)
    assert small["overlap"] == pytest.approx(1, abs=2e-3)
    assert small["window_hit"] > 0
    assert bounded["label"] == "full host=0.8 fitted"
    assert bounded["budget_tokens"] <= 0.8 * (150 + 36 + 32)
    assert bounded["output_error"] > 0


@pytest.mark.parametrize("name", slow_but(["quality", "selection", "budget"], "quality"))
def test_table(command: list[str], name: str) -> None:
    """By the names of the two commands that were there before, too."""
    result = runner.invoke(app, ["bench", name, *command[2:]])
    assert result.exit_code == 0, result.output
    assert "36 decode steps" in result.stdout
    assert "relative to exact top-k at the same budget" in flat(result.stdout)
    assert "exact_topk recent_tokens=8 dense_layers=1 │ 30 │ 30 │" in " ".join(
        result.stdout.split()
    )
    assert "host=SHARE" not in result.stdout


def test_table_in_80_columns(command: list[str]) -> None:
    """No cell is cut: it comes in two parts."""
    result = runner.invoke(app, command, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    whole = runner.invoke(app, command).stdout
    for name, _, _ in quality_output.COLUMNS:
        assert name in flat(result.stdout)
    assert result.stdout.count("exact_topk") == 2 * whole.count("exact_topk")
    assert "relative to exact top-k at the same budget" in flat(result.stdout)


def test_text_of_a_file(command: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 6, encoding="utf-8")
    result = runner.invoke(app, [*command, "--text", str(text), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["settings"]["text"]["path"] == str(text)
    text.write_text("Too short.", encoding="utf-8")
    result = runner.invoke(app, [*command, "--text", str(text)])
    assert result.exit_code == 1
    assert "the text has 10 tokens, but context=150 + steps=36" in flat(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--policy", "qest"], 2, "unknown 'qest'; available: exact_topk, full"),
        (["--budget-tokens", "many"], 2, "integers of at least 1"),
        (["--option", "alpha"], 2, "expected key=value, got 'alpha'"),
        (["--option", "alpha=0.2"], 2, "no option 'alpha' in exact_topk; available: budget_tokens"),
        (["--option", "lfps.alpha=0.2"], 2, "'lfps' is not among the policies exact_topk"),
        (["--budget-tokens", "11"], 1, "budget_tokens=11 cannot hold sink_tokens=4"),
        (["--budget-tokens", "150"], 1, "holds the whole context of 150 tokens"),
        (["--steps", "400"], 1, "are 582 tokens, but this model has 512 positions"),
        (["--text", "/no/such/file"], 1, "No such file or directory: '/no/such/file'"),
        (["--host-share", "1.5"], 2, "shares above 0 and at most 1"),
        (
            ["--host-share", "0.5", "--evictions", "h2o"],
            2,
            "unknown 'h2o'; available: auto, reread",
        ),
        (["--host-share", "0.5"], 1, "0.5 of the"),
        (["--evictions", "rkv"], 2, "needs --host-share"),
    ],
)
def test_bad_options(command: list[str], arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, [*command, *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in flat(result.stderr)


def test_help_teaches() -> None:
    result = runner.invoke(app, ["bench", "quality", "--help"])
    assert result.exit_code == 0
    for text in ("--host-share", "offload bench quality --text book.txt", "KL", "Jaccard"):
        assert text in result.stdout
    for policy in available_policies():
        assert policy in result.stdout


def test_grid() -> None:
    options = option_values(["exact_topk.sink_tokens=2,4", "dense_layers=1"], option="--option")
    assert options == {"exact_topk.sink_tokens": [2, 4], "dense_layers": [1]}
    quoted = option_values(["tidal_decode.select_layers='2,13',5"], option="--option")
    assert quoted == {"tidal_decode.select_layers": ["2,13", 5]}
    policies = policy_grid(["full", "exact_topk"], [100, 200], options, option="--option")
    assert policies[0].name == "full"
    assert policies[1:] == [
        ExactTopK(budget_tokens=budget, sink_tokens=sinks, dense_layers=1)
        for budget in (100, 200)
        for sinks in (2, 4)
    ]
    with pytest.raises(typer.BadParameter, match="no option 'depth'"):
        policy_grid(["full"], [100], {"depth": [1]}, option="--option")


def test_unknown_values_are_dashes() -> None:
    row: dict[str, Any] = {key: None for _, key, _ in quality_output.COLUMNS}
    assert set(quality_output.cells(row)) == {quality_output.UNKNOWN}
