"""`offload bench selection` on a tiny model: outputs and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from offload.bench.selection import output as selection_output
from offload.bench.selection.measure import SelectionMeasurement
from typer.testing import CliRunner

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
    return ["bench", "selection", str(tiny_folders["llama"]), *arguments]


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_json(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--budget-share", "0.4", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["machine"]["isa"]
    assert document["settings"]["context"] == 150
    assert [row["budget_tokens"] for row in document["rows"]] == [None, 30, 60]
    full, small, large = document["rows"]
    assert set(full) == set(SelectionMeasurement.__dataclass_fields__)
    assert full["kl"] == 0
    assert small["options"]["recent_tokens"] == 8
    assert small["mass_kept"] < large["mass_kept"] < full["mass_kept"] == pytest.approx(1)
    assert small["overlap"] == pytest.approx(1, abs=2e-3)
    assert small["window_hit"] > 0


def test_csv(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "-o", "csv"])
    assert result.exit_code == 0, result.output
    full, topk = csv.DictReader(result.stdout.splitlines())
    assert full["policy"] == "full"
    assert full["budget_tokens"] == ""
    assert topk["label"] == "exact_topk recent_tokens=8 dense_layers=1"
    assert "recent_tokens=8" in topk["options"].split()
    assert float(topk["mass_kept"]) < 1


def test_markdown(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "-o", "md"])
    assert result.exit_code == 0, result.output
    header, rule, full, topk = result.stdout.splitlines()
    assert header.startswith("| policy | budget | attended | candidates | overlap | mass |")
    assert len({line.count("|") for line in (header, rule, full, topk)}) == 1
    assert full.startswith(f"| full | {selection_output.UNKNOWN} | 1")
    assert topk.startswith("| exact_topk recent_tokens=8 dense_layers=1 | 30 | 30 |")


def test_table_and_plot(command: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    picture = tmp_path / "quality.png"
    result = runner.invoke(app, [*command, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "36 decode steps" in result.stdout
    assert "relative to exact top-k at the same budget" in flat(result.stdout)
    assert "wrote" in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_of_a_file(command: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 6, encoding="utf-8")
    result = runner.invoke(app, [*command, "--text", str(text), "-o", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["settings"]["text"] == str(text)
    text.write_text("Too short.", encoding="utf-8")
    result = runner.invoke(app, [*command, "--text", str(text)])
    assert result.exit_code == 1
    assert "the text has 10 tokens, but context=150 + steps=36" in flat(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--policy", "qest"], 2, "unknown 'qest'; available: exact_topk, full"),
        (["--output", "xml"], 2, "unknown 'xml'; available: table, json, csv, md"),
        (["--budget-tokens", "many"], 2, "integers of at least 1"),
        (["--option", "alpha"], 2, "expected key=value, got 'alpha'"),
        (["--option", "alpha=0.2"], 2, "no option 'alpha' in exact_topk; available: budget_tokens"),
        (["--option", "lfps.alpha=0.2"], 2, "'lfps' is not among the policies exact_topk"),
        (["--budget-tokens", "11"], 1, "budget_tokens=11 cannot hold sink_tokens=4"),
        (["--budget-tokens", "150"], 1, "holds the whole context of 150 tokens"),
        (["--steps", "400"], 1, "are 582 tokens, but this model has 512 positions"),
        (["--text", "/no/such/file"], 1, "No such file or directory: '/no/such/file'"),
        (["--plot", "picture.gif"], 1, "must end in one of .png, .svg, .pdf"),
        (["--plot", "/no/such/folder/a.png"], 1, "no folder /no/such/folder"),
    ],
)
def test_bad_options(command: list[str], arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, [*command, *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in flat(result.stderr)


def test_a_picture_needs_matplotlib(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    result = runner.invoke(app, [*command, "--plot", str(tmp_path / "picture.png")])
    assert result.exit_code == 1
    assert "--plot needs matplotlib; install it with: pip install 'offload[plot]'" in flat(
        result.stderr
    )


def test_help_teaches() -> None:
    result = runner.invoke(app, ["bench", "selection", "--help"])
    assert result.exit_code == 0
    for text in ("--budget-share", "offload bench selection --text book.txt", "KL", "Jaccard"):
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
    row: dict[str, Any] = {key: None for _, key, _ in selection_output.COLUMNS}
    assert set(selection_output.cells(row)) == {selection_output.UNKNOWN}
