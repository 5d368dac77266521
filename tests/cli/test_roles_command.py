"""`offload roles import`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from offload.cli import app
from offload.loading.names import checkpoint_name
from offload.policies.head_roles import HeadRoles
from offload.policies.registry import make_policy

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
