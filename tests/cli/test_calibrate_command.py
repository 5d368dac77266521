"""`offload calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_models import make_tiny_model
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
    arguments = ["calibrate", model, "-o", str(path), "--retrieval-heads", "2", "--context", "300"]
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
    result = runner.invoke(app, [*arguments, "--context", "400", "--threads", "1"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["model_type"] == "llama"
    assert document["num_tokens"] == 400
    assert document["retrieval_heads"] == 1
    assert 0 < document["mass_kept_evenly_spaced"] <= document["mass_kept"] <= 1
    assert document["select_layers"] == [2]
    assert "400 tokens of notes.txt" in HeadRoles.load(path).made_by


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """With positions enough for look-ups."""
    folder = tmp_path_factory.mktemp("long")
    make_tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_heads_of_per_head(long_model: str, tmp_path: Path) -> None:
    """Those to whose attention the table and the JSON testify; the policy takes the file."""
    path = tmp_path / "roles.json"
    arguments = ["calibrate", long_model, "--policy", "per_head", "-o", str(path)]
    arguments += ["--dense-layers", "1", "--retrieval-heads", "1", "--context", "1024"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "1 retrieval heads after the first 1 layers, whose heads all retrieve." in shown
    assert f"Written to {path}" in shown
    roles = HeadRoles.load(path)
    roles.check(num_layers=3, num_kv_heads=2, head_dim=32, model_type="llama")
    assert "look-ups in texts of 1024 tokens: 1 heads after the first 1 layers" in roles.made_by
    policy = make_policy("per_head", head_roles=str(path), dense_layers=1)
    policy.check_model(num_layers=3, num_qo_heads=6, num_kv_heads=2, head_dim=32)
    document = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert document["policy"] == "per_head"
    mass = np.array(document["lookup_mass"])
    assert mass.shape == (3, 2)
    (layer_idx,), (head,) = np.nonzero(roles.array)
    assert mass[layer_idx, head] == mass[1:].max()
    assert f"{layer_idx} │ {head} ({mass[layer_idx, head]:.2f})" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1000"], "--context 1000 must be in [1024, 2048] for per_head"),
        (["--context", "4096"], "--context 4096 must be in [1024, 2048] for per_head"),
        (["--retrieval-heads", "3"], "at most 1 may retrieve, a sixth of this model's 6 KV heads"),
        (["--text", "notes.txt"], "--text: the texts of per_head are made"),
        (["--policy", "lychee_decode", "--dense-layers", "1"], "--dense-layers: is for --policy"),
        (["--policy", "lfps"], "unknown policy 'lfps'; available: lychee_decode, per_head, auto"),
    ],
)
def test_refusals_of_per_head(
    long_model: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "roles.json"
    command = ["calibrate", long_model, "--policy", "auto", "-o", str(path), *arguments]
    result = runner.invoke(app, command)
    assert result.exit_code in (1, 2), result.output
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert message in shown
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "100"], "calibration needs a text of at least 256 tokens, got 100"),
        (["--context", "600"], "a calibration text of 600 tokens exceeds the 512 tokens of this"),
        (["--retrieval-heads", "5", "--context", "300"], "retrieval_heads=5 must be in [0, 4]"),
        (["--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (["-o", "/nowhere/roles.json"], "cannot be written: no folder /nowhere"),
        (["-o", "/"], "--output / is a folder"),
        (["--policy", "per_head"], "reads at most 512 tokens, but per_head is calibrated on at le"),
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
    options = ("--retrieval-heads", "--text", "--context", "--policy", "--dense-layers")
    for text in (*options, "lychee_decode", "per_head", "head_roles=roles"):
        assert text in result.stdout
    assert runner.invoke(app, ["calibrate", "model"]).exit_code == 2  # no --output
