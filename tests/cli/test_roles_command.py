"""`offload roles import`."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.cli import app
from offload.loading.names import checkpoint_name
from offload.policies.lychee_decode.calibration import (
    Calibration,
    calibration_tokens,
    observe_heads,
    roles_from,
)
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles
from offload.system.stdlib_text import stdlib_prose

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
GATES = np.array([[0.1, 0.0], [0.9, 0.2], [0.3, 0.9]])


@pytest.fixture
def model(tiny_folders: dict[str, Path]) -> str:
    return str(tiny_folders["llama"])  # 3 layers of 2 KV heads


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    path = tmp_path / "full_attention_heads.tsv"
    np.savetxt(path, GATES, delimiter="\t")  # as DuoAttention does
    return path


@pytest.mark.parametrize(
    ("options", "below"),
    [
        ([], [[False, False], [False, False]]),  # an eighth of 4 is none
        (["--share", "0.25"], [[True, False], [False, False]]),  # of equal ones the first
        (["--share", "0.75"], [[True, False], [True, True]]),
        (["--threshold", "0.3"], [[True, False], [True, True]]),
        (["--threshold", "0.5"], [[True, False], [False, True]]),
        (["--share", "1"], [[True, True], [True, True]]),
    ],
)
def test_gates_become_roles(
    model: str, tsv: Path, tmp_path: Path, options: list[str], below: list[list[bool]]
) -> None:
    out = tmp_path / "roles.json"
    result = runner.invoke(
        app, ["roles", "import", str(tsv), model, "--out", str(out), "--json", *options]
    )
    assert result.exit_code == 0, result.output
    roles = HeadRoles.load(out)
    assert roles.array.tolist() == [[True, True], *below]
    assert roles.checkpoint == checkpoint_name(Path(model))
    assert "imported from full_attention_heads.tsv" in roles.made_by
    assert json.loads(result.stdout)["retrieval_heads"] == np.sum(below)
    assert make_policy("lychee_decode", head_roles=str(out)).head_roles == roles


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("0.1\t0.2\n0.3\t0.4\n", "2 rows, but this model has num_layers=3"),
        ("1\t1\n1\t1\n1\t1\t1\n", "line 3: 3 columns, but this model has num_kv_heads=2"),
        ("1\t1\n1 1\n1\t1\n", "line 2: expected numbers with tabs between, got '1 1'"),
        ("1\t1\n1\tnan\n1\t1\n", "line 2: expected numbers"),
        ("", "0 rows, but"),
    ],
)
def test_other_files_are_refused(model: str, tmp_path: Path, content: str, said: str) -> None:
    tsv, out = tmp_path / "heads.tsv", tmp_path / "roles.json"
    tsv.write_text(content)
    out.write_text("mine")
    result = runner.invoke(app, ["roles", "import", str(tsv), model, "--out", str(out)])
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
    assert out.read_text() == "mine"


def test_the_file_that_is_read_is_not_written(model: str, tsv: Path) -> None:
    before = tsv.read_bytes()
    link = tsv.with_name("link.json")
    link.symlink_to(tsv)
    for out in (tsv, link):
        result = runner.invoke(app, ["roles", "import", str(tsv), model, "--out", str(out)])
        assert result.exit_code == 1
        assert "is the file to read; give another name" in " ".join(result.output.split())
        assert tsv.read_bytes() == before


@pytest.mark.parametrize("threshold", ["nan", "inf"])
def test_thresholds_that_no_gate_has(model: str, tsv: Path, tmp_path: Path, threshold: str) -> None:
    arguments = ["roles", "import", str(tsv), model, "--out", str(tmp_path / "roles.json")]
    result = runner.invoke(app, [*arguments, "--threshold", threshold])
    assert result.exit_code == 2
    assert f"must be a number, got {threshold}" in " ".join(result.output.split())
    assert not (tmp_path / "roles.json").exists()


def test_share_or_threshold(model: str, tsv: Path, tmp_path: Path) -> None:
    arguments = ["roles", "import", str(tsv), model, "--out", str(tmp_path / "roles.json")]
    both = runner.invoke(app, [*arguments, "--share", "0.5", "--threshold", "0.5"])
    assert both.exit_code == 2
    missing = runner.invoke(app, [*arguments[:2], str(tmp_path / "none.tsv"), *arguments[3:]])
    assert missing.exit_code == 1
    assert "none.tsv" in missing.output
    assert not (tmp_path / "roles.json").exists()


@pytest.fixture
def deep(tmp_path: Path) -> tuple[str, Path, Calibration]:
    """A model whose heads differ, a file of its calibrated roles as gates, and what a calibration
    of 300 tokens measures."""
    folder, path = tmp_path / "deep", tmp_path / "found.tsv"
    make_tiny_model("llama", num_hidden_layers=6).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    loaded: Any = OffloadedModel.from_pretrained(folder, policy="full")
    found = observe_heads(loaded._offload.lean, calibration_tokens(byte_tokenizer(), 300))
    roles = roles_from(found, model_type="llama", head_dim=32, retrieval_heads=4)
    np.savetxt(path, roles.array.astype(float), delimiter="\t")
    return str(folder), path, found


def test_imported_heads_are_verified(deep: tuple[str, Path, Calibration], tmp_path: Path) -> None:
    """Those that a calibration chooses are as good as these, by the measure of another text; the
    worst choice is worse, which is said, in the file and in JSON, too."""
    model, tsv, found = deep
    out = tmp_path / "roles.json"
    command = ["roles", "import", str(tsv), model, "-o", str(out), "--context", "300"]
    same = runner.invoke(app, [*command, "--threshold", "0.5"])
    assert same.exit_code == 0, same.output
    assert "warning" not in same.stderr
    imported, calibrated = (
        next(line for line in same.stdout.splitlines() if name in line).split("│")[2:4]
        for name in ("imported", "calibrated")
    )
    assert imported == calibrated
    choices = [np.isin(np.arange(12), x).reshape(6, 2) for x in combinations(range(2, 12), 4)]
    np.savetxt(tsv, min(choices, key=found.kept_by).astype(float), delimiter="\t")
    result = runner.invoke(app, [*command, "--share", "0.4", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    verified, made_by = document["verified"], HeadRoles.load(out).made_by
    assert document["retrieval_heads"] == 4
    assert (verified["num_tokens"], verified["tokens_per_head"]) == (300, 18)
    loaded: Any = OffloadedModel.from_pretrained(model, policy="full")
    text = stdlib_prose(600).removeprefix(stdlib_prose(300))
    other = observe_heads(loaded._offload.lean, calibration_tokens(byte_tokenizer(), 300, text))
    for name, roles in (
        ("imported", HeadRoles.load(out).array),
        ("calibrated", roles_from(found, model_type="", head_dim=32, retrieval_heads=4).array),
    ):
        kept = verified[name]["mass_kept"]
        assert kept == pytest.approx(other.kept_by(roles), abs=6e-4)
        assert f"{kept:.3f}" in made_by
    assert verified["worse"]
    said = " ".join(result.stderr.split())
    assert "warning: the imported heads are worse than as many calibrated ones" in said
    assert "--retrieval-heads 4 -o PATH` writes" in said
    without = runner.invoke(app, [*command[:-2], "--no-verify", "--json"])
    assert json.loads(without.stdout)["verified"] is None
    assert HeadRoles.load(out).made_by.endswith("share 0.125 of the KV heads after layer 0")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "200"], "--context 200 must be in [256, 512] for lychee_decode"),
        (["--context", "600"], "--context 600 must be in [256, 512] for lychee_decode"),
        (["--context", "300", "--no-verify"], "--context: cannot be combined with --no-verify"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
    ],
)
def test_what_is_not_verified(
    model: str,
    tsv: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    said: str,
) -> None:
    """It is refused before any weight is read, and nothing is overwritten."""
    monkeypatch.setattr(OffloadedModel, "from_pretrained", None)
    out = tmp_path / "roles.json"
    out.write_text("mine")
    result = runner.invoke(app, ["roles", "import", str(tsv), model, "-o", str(out), *options])
    assert result.exit_code in (1, 2), result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert out.read_text() == "mine"


def test_texts_that_there_are_not(tsv: Path, tmp_path: Path) -> None:
    """The first takes all of the docstrings."""
    model, context = tmp_path / "long", 35_000
    make_tiny_model("llama", max_position_embeddings=context).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    command = ["roles", "import", str(tsv), str(model), "-o", str(tmp_path / "roles.json")]
    result = runner.invoke(app, [*command, "--context", str(context)])
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "--context 35000: one of two texts from the standard library has 0 tokens" in said
    assert said.endswith("needs at least 256; lower --context")


def test_a_measurement_that_fails_overwrites_nothing(
    model: str, tsv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offload.policies.lychee_decode.calibration.observe_heads", interrupted)
    out = tmp_path / "roles.json"
    out.write_text("mine")
    result = runner.invoke(app, ["roles", "import", str(tsv), model, "-o", str(out)])
    assert result.exit_code == 130
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({tsv.name, out.name})


def test_models_without_heads_or_weights(tmp_path: Path) -> None:
    tsv, out, one = tmp_path / "heads.tsv", tmp_path / "roles.json", tmp_path / "one"
    make_tiny_model("llama", num_hidden_layers=1).save_pretrained(one)
    short = tmp_path / "short"
    make_tiny_model("llama", max_position_embeddings=200).save_pretrained(short)
    np.savetxt(tsv, np.ones((32, 8)), delimiter="\t")
    command = ["roles", "import", str(tsv)]
    for given, said in (
        (str(one), "this model has one layer, whose KV heads all retrieve"),
        ("llama-3.1-8b", "is a shape, which has no weights to verify with: --no-verify"),
    ):
        result = runner.invoke(app, [*command, given, "-o", str(out)])
        assert result.exit_code == 1, result.output
        assert said in " ".join(result.stderr.split())
        assert not out.exists()
    result = runner.invoke(app, [*command, "llama-3.1-8b", "-o", str(out), "--no-verify"])
    assert result.exit_code == 0, result.output
    assert HeadRoles.load(out).checkpoint == ""
    np.savetxt(tsv, GATES, delimiter="\t")
    out.unlink()
    result = runner.invoke(app, [*command, str(short), "-o", str(out)])
    assert result.exit_code == 1
    assert "is calibrated on at least 256: --no-verify imports" in " ".join(result.stderr.split())
    (short / "model.safetensors").unlink()  # such as where the hub's config alone is here
    result = runner.invoke(app, [*command, str(short), "-o", str(out), "--no-verify"])
    assert result.exit_code == 0, result.output
    assert HeadRoles.load(out).checkpoint == ""
