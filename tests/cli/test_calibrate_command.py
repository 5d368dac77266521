"""`offload calibrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli import app
from offload.policies import LycheeDecode
from offload.policies.lychee_decode.roles import HeadRoles
from offload.policies.registry import make_policy

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})


@pytest.fixture
def model(tiny_folders: dict[str, Path]) -> str:
    return str(tiny_folders["llama"])


def test_it_writes_a_file_for_the_policy(model: str, tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    arguments = ["calibrate", model, "-o", str(path), "--retrieval-heads", "2", "--tokens", "300"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "2 retrieval heads after layer 0 keep 0." in shown
    assert "with 18 tokens per head (evenly spaced: 0." in shown
    assert "For tidal_decode: select_layers=2" in shown
    assert f"Written to {path}" in result.stdout
    roles = HeadRoles.load(path)
    roles.check(num_layers=3, num_kv_heads=2, head_dim=32, model_type="llama")
    assert roles.num_retrieval_heads == 2
    assert "300 tokens of the standard library's docstrings" in roles.made_by
    assert make_policy("lychee_decode", head_roles=str(path)) == LycheeDecode(head_roles=roles)


def test_json(model: str, tmp_path: Path) -> None:
    path, text = tmp_path / "roles.json", tmp_path / "notes.txt"
    text.write_text("A lighthouse keeper counts ships. " * 20, encoding="utf-8")
    arguments = ["calibrate", model, "-o", str(path), "--text", str(text), "--json"]
    result = runner.invoke(app, [*arguments, "--tokens", "400", "--num-threads", "1"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["model_type"] == "llama"
    assert document["num_tokens"] == 400
    assert document["retrieval_heads"] == 1
    assert 0 < document["mass_kept_evenly_spaced"] <= document["mass_kept"] <= 1
    assert document["select_layers"] == [2]
    assert "400 tokens of notes.txt" in HeadRoles.load(path).made_by


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100"], "calibration needs a text of at least 256 tokens, got 100"),
        (["--tokens", "600"], "a calibration text of 600 tokens exceeds the 512 tokens of this"),
        (["--retrieval-heads", "5", "--tokens", "300"], "retrieval_heads=5 must be in [0, 4]"),
        (["--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (["-o", "/nowhere/roles.json"], "cannot be written: no folder /nowhere"),
        (["-o", "/"], "--output / is a folder"),
    ],
)
def test_refusals_are_one_line(
    model: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "roles.json"
    result = runner.invoke(app, ["calibrate", model, "-o", str(path), *arguments])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert not path.exists()


def test_an_unknown_model(tmp_path: Path) -> None:
    result = runner.invoke(app, ["calibrate", "/no/model", "-o", str(tmp_path / "roles.json")])
    assert result.exit_code == 1
    assert "no such model folder or GGUF file: /no/model" in result.stderr


def test_help() -> None:
    result = runner.invoke(app, ["calibrate", "--help"])
    assert result.exit_code == 0
    for text in ("--retrieval-heads", "--text", "--tokens", "lychee_decode", "head_roles=roles"):
        assert text in result.stdout
    assert runner.invoke(app, ["calibrate", "model"]).exit_code == 2  # no --output
