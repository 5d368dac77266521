"""`offload inspect heads`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model
from typer.testing import CliRunner

from offload.cli import app
from offload.loading.names import checkpoint_name
from offload.policies.lychee_decode.calibration import calibration_tokens
from offload.policies.lychee_decode.overlap import head_overlap
from offload.runtime.model import OffloadedModel
from offload.selection.head_roles import HeadRoles
from offload.selection.kept_roles import keep_roles

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
RETRIEVAL = np.array([[0, 0], [0, 0], [0, 1], [0, 0]], bool)
SIZES = ["--context", "200", "--budget-tokens", "30"]


@pytest.fixture
def model(tiny_folders: dict[str, Path]) -> str:
    return str(tiny_folders["llama"])


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with a layer more: `per_head` has a retrieval head of it."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "deep"
    make_tiny_model("llama", num_hidden_layers=4).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    name = checkpoint_name(folder)
    roles = HeadRoles.of(RETRIEVAL, head_dim=32, made_by="a test", checkpoint=name)
    keep_roles("per_head", roles, 1, 2)
    return str(folder)


def test_json(model: str, tmp_path: Path, offloaded_models: dict[str, Any]) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("A lighthouse keeper counts ships. " * 20, encoding="utf-8")
    arguments = ["inspect", "heads", model, *SIZES, "--text", str(text), "--json"]
    result = runner.invoke(app, [*arguments, "--threads", "1"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    tokens = calibration_tokens(byte_tokenizer(), 200, text.read_text())
    shares = head_overlap(offloaded_models["llama"]._offload.lean, tokens, 30).shares
    assert [row["layer"] for row in document["layers"]] == [1, 2]
    for row, expected in zip(document["layers"], shares, strict=True):
        np.testing.assert_allclose(row["heads"], expected, atol=1e-3)
        assert row["mean"] == pytest.approx(expected.mean(), abs=1e-3)
    assert document["mean"] == pytest.approx(shares.mean(), abs=1e-3)
    assert document["by_chance"] == pytest.approx(30 / 184, abs=1e-2)
    assert (document["num_tokens"], document["budget_tokens"]) == (200, 30)
    assert (document["num_layers"], document["num_kv_heads"]) == (3, 2)
    assert document["text"] == "notes.txt"
    assert document["checkpoint"] == checkpoint_name(Path(model))
    assert document["roles"] is None


def test_a_text_in_which_heads_cannot_differ(model: str) -> None:
    arguments = ["inspect", "heads", model, "--context", "200", "--budget-tokens", "168"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "warning: the heads can hardly differ here: by chance alone they share 91%, as" in said
    assert "168 tokens are most of 200; give a longer text (--context 672 or more), or" in said
    assert json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)["can_differ"] is False
    roomy = runner.invoke(app, ["inspect", "heads", model, *SIZES])
    assert "hardly differ" not in roomy.output


def test_the_table_marks_heads_that_retrieve(kept: str) -> None:
    arguments = ["inspect", "heads", kept, *SIZES]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert document["text"] == "the standard library's docstrings"
    assert document["roles"]["policy"] == "per_head"
    assert document["roles"]["made_by"] == "a test"
    assert document["roles"]["retrieval"] == RETRIEVAL.tolist()
    title, chance, _, *lines = result.stdout.splitlines()
    assert title.endswith("200 tokens: heaviest 30 shared with the layer above")
    assert chance == f"Per cent, by KV head; by chance {document['by_chance']:.0%}"
    rows = [line.split() for line in lines]
    assert rows[0] == ["layer", "0", "1", "mean"]
    for cells, row, marks in zip(rows[1:4], document["layers"], RETRIEVAL[1:], strict=True):
        assert cells[0] == str(row["layer"])
        assert [cell.endswith("*") for cell in cells[1:3]] == marks.tolist()
        shown = [float(cell.rstrip("*")) for cell in cells[1:]]
        np.testing.assert_allclose(shown, [100 * x for x in (*row["heads"], row["mean"])], atol=0.6)
    assert rows[4][0] == "mean"
    assert float(rows[4][-1]) == pytest.approx(100 * document["mean"], abs=0.6)
    assert "* retrieves under per_head: a test" in result.stdout
    shares = np.array([row["heads"] for row in document["layers"]])
    others = shares[~RETRIEVAL[1:]].mean()
    said = f"These share {shares[1, 1]:.0%} on average, the others {others:.0%}."
    assert said in result.stdout


def test_damaged_roles_of_the_cache(kept: str, tmp_path: Path) -> None:
    """They are said to be damaged; that they are found again is not this command's promise."""
    (path,) = tmp_path.rglob("*-1-after-2.json")
    path.write_text(path.read_text()[:40])
    result = runner.invoke(app, ["inspect", "heads", kept, *SIZES, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["roles"] is None
    said = " ".join(result.stderr.split())
    assert (
        "WARNING the heads kept of this model are damaged or cannot be read, and are not used"
        in said
    )
    assert "is not JSON" in said
    assert "Loading it with per_head finds them again" in said
    assert path.name in said.replace(" ", "")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(kept: str, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    path = tmp_path / f"heads.{suffix}"
    result = runner.invoke(app, ["inspect", "heads", kept, *SIZES, "--picture", str(path)])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.stderr
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--budget-tokens 1024 needs a text of at least 1056 tokens, got 512"),
        (
            ["--budget-tokens", "200", "--context", "200"],
            "a text of at least 232 tokens, got",
        ),
        (
            ["--context", "600", "--budget-tokens", "30"],
            "600 tokens exceeds the 512 tokens that this model reads; lower --context",
        ),
        ([*SIZES, "--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (
            [*SIZES, "--text", "SHORT"],
            "--budget-tokens 30 needs a text of at least 62 tokens, got 5",
        ),
        ([*SIZES, "--text", "EMPTY"], "no text there"),
        ([*SIZES, "--picture", "heads.gif"], "--picture heads.gif: the name must end in one of"),
        ([*SIZES, "--picture", "/nowhere/heads.png"], "no folder /nowhere"),
        ([*SIZES, "--dtype", "int8"], "unknown dtype 'int8'; available: auto, "),
    ],
)
def test_refusals_come_before_the_weights(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(OffloadedModel, "from_pretrained", None)
    for name, content in (("SHORT", "words"), ("EMPTY", " ")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    paths = {name: str(tmp_path / name) for name in ("SHORT", "EMPTY")}
    given = [paths.get(argument, argument) for argument in arguments]
    result = runner.invoke(app, ["inspect", "heads", model, *given])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert message in result.stderr


def test_an_unknown_model() -> None:
    result = runner.invoke(app, ["inspect", "heads", "/no/model"])
    assert result.exit_code == 1
    assert "/no/model" in result.stderr
