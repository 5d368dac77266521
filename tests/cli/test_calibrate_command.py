"""`offload calibrate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_models import make_tiny_model
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.cli import app
from offload.loading.names import checkpoint_name
from offload.policies import LycheeDecode
from offload.policies.registry import make_policy
from offload.policies.tidal_decode import SelectLayers
from offload.selection.head_roles import HeadRoles

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
    assert roles.checkpoint == checkpoint_name(Path(model)) != ""


def test_it_reads_what_a_short_model_can(model: str, tmp_path: Path) -> None:
    path = tmp_path / "roles.json"
    result = runner.invoke(app, ["calibrate", model, "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "512 tokens of the standard library's docstrings" in HeadRoles.load(path).made_by


def test_a_file_beside_the_weights_is_none_of_them(model: str, tmp_path: Path) -> None:
    """Written there, it still fits the model, and a copy of it, but not a fine-tuned one."""
    folder = Path(shutil.copytree(model, tmp_path / "copy"))
    path = folder / "roles.json"
    arguments = ["calibrate", str(folder), "-o", str(path), "--context", "300"]
    assert runner.invoke(app, arguments).exit_code == 0
    roles = HeadRoles.load(path)
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32}
    for same in (folder, Path(model)):
        roles.check(**shape, checkpoint=checkpoint_name(same))
    other = make_tiny_model("llama")
    other.lm_head.weight.data *= 1.01
    other.save_pretrained(folder)
    with pytest.raises(ValueError, match="was made for other weights of this shape"):
        roles.check(**shape, checkpoint=checkpoint_name(folder))


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
    assert document["checkpoint"] == HeadRoles.load(path).checkpoint
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
        (["--retrieval-heads", "3"], "they look at everything; lower --retrieval-heads"),
        (["--dense-layers", "3"], "--dense-layers 3 leave no heads to choose: this model has 3 la"),
        (["--text", "notes.txt"], "--text: the texts of per_head are made"),
        (["--policy", "lychee_decode", "--dense-layers", "1"], "--dense-layers: is for --policy"),
        (["--policy", "lfps"], "unknown policy 'lfps'; available: lychee_decode, per_head, tidal"),
        (["--select-layers", "2"], "--select-layers: is for --policy tidal_decode"),
        (["--budget-tokens", "99"], "--budget-tokens: is for --policy tidal_decode"),
        (["--device", "cuda"], "--device: is for --policy tidal_decode"),
    ],
)
def test_refusals_of_per_head(
    long_model: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "roles.json"
    command = ["calibrate", long_model, "--policy", "per_head", "-o", str(path), *arguments]
    result = runner.invoke(app, command)
    assert result.exit_code in (1, 2), result.output
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert message in shown
    assert not path.exists()


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """With layers to choose from, and positions enough for texts with questions."""
    folder = tmp_path_factory.mktemp("deep")
    stock = make_tiny_model("llama", num_hidden_layers=5, max_position_embeddings=2304)
    stock.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SWEEP = ["--policy", "tidal_decode", "--context", "2048", "--batches", "1", "--batch-size", "2"]


@pytest.mark.slow
def test_layers_of_tidal_decode(
    deep_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy finds them, the table shows them, and so does the JSON, of the same file."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    command = ["calibrate", deep_model, *SWEEP, "--dense-layers", "1", "--budget-tokens", "128,90"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    (path,) = (path for path in tmp_path.rglob("*.json"))
    layers = SelectLayers.load(path)
    assert f"select_layers={','.join(map(str, layers.select_layers))} Written to {path}" in shown
    assert "tidal_decode takes them whenever this model is loaded." in shown
    assert "KL, 128" in shown
    assert "KL, 90" in shown
    layers.check(num_layers=5, num_kv_heads=2, head_dim=32, model_type="llama")
    assert layers.select_layers[0] == layers.dense_layers == 1
    assert len(layers.select_layers) == 2  # as many as `default_select_layers` has
    assert "2 texts of 2048 tokens, with budgets of 128 and 90" in layers.made_by

    def of_load(dense_layers: int) -> SelectLayers:
        policy = make_policy("tidal_decode", dense_layers=dense_layers)
        model: Any = OffloadedModel.from_pretrained(deep_model, policy=policy)
        taken: SelectLayers = model._offload.config.policy.select_layers
        return taken

    assert of_load(1) == layers
    others = of_load(0)  # the sweep's are behind one dense layer
    assert others.select_layers[0] == others.dense_layers == 0
    assert "calibration on look-ups" in others.made_by
    assert (of_load(0), of_load(1)) == (others, layers)

    other = tmp_path / "other.json"
    result = runner.invoke(app, [*command, "-o", str(other), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert SelectLayers.load(other) == layers
    assert tuple(document["select_layers"]) == layers.select_layers
    assert document["settings"]["budgets"] == [128, 90]
    assert not document["found_by_policy"]
    singles = [x for x in document["scores"] if x["budget_tokens"] == 90]
    assert [x["select_layers"] for x in singles] == [[1], [1, 2], [1, 3], [1, 4]]
    assert all(x["kl"] > 0 and 0 <= x["agrees"] <= 1 for x in document["scores"])
    assert [x["select_layers"] for x in document["held_out"][-2:]] == [[1], [1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1000"], "--context 1000 must be at least 1024"),
        (["--budget-tokens", "1024,2048"], "--budget-tokens 2048 must be in (68, 2048)"),
        (["--select-layers", "3"], "--select-layers 3 must be in [1, 2]: this model has 5 layers"),
        (["--dense-layers", "5"], "--dense-layers 5 leave nothing to choose: of this"),
        (["--context", "2300"], "their answers take 2340 tokens, more than the 2304 of this model"),
        (["--text", "notes.txt"], "--text: the texts of tidal_decode are made"),
        (["--retrieval-heads", "3"], "--retrieval-heads: tidal_decode has none"),
        (["--budget-tokens", "many"], "expected integers of at least 1"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["-o", "/nowhere/layers.json"], "cannot be written: no folder /nowhere"),
    ],
)
def test_refusals_of_a_sweep(
    deep_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    result = runner.invoke(app, ["calibrate", deep_model, *SWEEP, *arguments])
    assert result.exit_code in (1, 2), result.output
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not [*tmp_path.rglob("*.json")]


def test_types_with_more_than_plain_layers_are_refused_before_loading(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("phi3", num_hidden_layers=5, max_position_embeddings=4096).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("offload.loading.stock_model.load_stock_model", None)
    result = runner.invoke(app, ["calibrate", str(tmp_path), "--policy", "tidal_decode"])
    assert result.exit_code == 1
    assert "phi3 is not for calibration" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "100"], "--context 100 must be in [256, 512] for lychee_decode"),
        (["--context", "600"], "--context 600 must be in [256, 512] for lychee_decode"),
        (["--retrieval-heads", "5", "--context", "300"], "--retrieval-heads 5 must be in [0, 4]"),
        (["--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (["-o", "/nowhere/roles.json"], "cannot be written: no folder /nowhere"),
        (["-o", "/"], "--output / is a folder"),
        (["--policy", "per_head"], "reads at most 512 tokens, but per_head is calibrated on at le"),
        (
            ["--policy", "tidal_decode", "--dense-layers", "1"],
            "reads at most 512 tokens, but a sweep reads texts of at least 1024 and answers of up",
        ),
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
    assert "no such model folder, GGUF file or shape: /no/model" in result.stderr


def test_help() -> None:
    result = runner.invoke(app, ["calibrate", "--help"])
    assert result.exit_code == 0
    options = ("--retrieval-heads", "--text", "--context", "--policy", "--dense-layers")
    sweeps = ("--select-layers", "--batches", "--device", "tidal_decode")
    for text in (*options, *sweeps, "lychee_decode", "per_head", "head_roles=roles"):
        assert text in result.stdout
    assert runner.invoke(app, ["calibrate", "model"]).exit_code == 2  # no --output
