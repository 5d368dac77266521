"""`offload sessions`: list, export, import, rm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from offload.cli import app
from offload.engine.session_folder import SessionFolder
from offload.runtime.saving import FORMAT, SessionFiles
from offload.system.checked_file import CheckedFile, Entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = SessionFolder(tmp_path / "sessions")
    metadata = {"format": FORMAT, "rows": json.dumps([{"kv_len": 7}])}
    for session_id in ("first", "second"):
        file = CheckedFile(metadata, [Entry.of("0.kv.0", np.arange(7))])
        for _ in made.write(session_id, SessionFiles(file)):
            pass
    return made.folder


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["sessions", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.output


def test_list_export_import_rm(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.safetensors").write_bytes(b"123")
    listed = json.loads(run("list", folder, "--json"))["sessions"]
    assert {x["id"]: x["tokens"] for x in listed} == {"first": 7, "second": 7, "broken": "damaged"}
    assert "second" in run("list", folder)
    run("export", folder, "first", tmp_path / "copy")
    run("import", folder, tmp_path / "copy", "third")
    same = [(folder / f"{name}.safetensors").read_bytes() for name in ("first", "third")]
    assert same[0] == same[1] == (tmp_path / "copy").read_bytes()
    run("rm", folder, "first", "third", "broken")
    assert [each.session_id for each in SessionFolder(folder).sessions()] == ["second"]


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    good = (folder / "first.safetensors").read_bytes()
    (tmp_path / "bad").write_bytes(good[:-40] + b"\xff" + good[-39:])
    assert "damaged" in run("import", folder, tmp_path / "bad", "third", code=1)
    assert "session id" in run("import", folder, folder / "first.safetensors", "../x", code=1)
    assert "session id" in run("rm", folder, "../sessions/first", code=1)
    assert "there is no session 'nobody'" in run("rm", folder, "nobody", code=1)
    assert "there is no" in run("export", folder, "nobody", tmp_path / "x", code=1)
    assert not (tmp_path / "x").exists()
    assert len(SessionFolder(folder).sessions()) == 2
