"""Whoever may read what this project has written: all but conversations are by the umask."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.processes import run_program
from cases.profile_cases import machine_profile
from cases.tiny_models import byte_tokenizer, make_tiny_model, write_gguf

from offload import OffloadedModel
from offload.loading.gguf import converted_folder
from offload.planning.profile import store_profile
from offload.selection.head_roles import HeadRoles
from offload.system.permissions import default_mode

NOBODY = 65534
# Who asks are forks: another user may not be able to start this interpreter.
ASKS = """import os, sys
from pathlib import Path
from offload.loading.gguf import converted_folder

os.umask(0o022)
path = Path(sys.argv[1])
folder = converted_folder(path)
for closed in (None, "model.safetensors", "."):
    asked = folder / (closed or ".")
    mode = asked.stat().st_mode
    if closed:
        asked.chmod(0o600)
    child = os.fork()
    if child == 0:
        os.setuid(int(sys.argv[2]))
        try:
            print(converted_folder(path), flush=True)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    asked.chmod(mode)
"""


@pytest.fixture(params=[0o002, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def _modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_a_converted_model(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny_model("llama"), byte_tokenizer())
    folder = converted_folder(path)
    modes = _modes(folder)
    assert "model.safetensors" in modes
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert folder.parent.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_saved_model(umask: int, tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    OffloadedModel.from_pretrained(tiny_folders["llama"]).save_pretrained(tmp_path / "saved")
    modes = _modes(tmp_path / "saved")
    assert "model.safetensors" in modes
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)


def test_profiles_and_roles(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    profile = store_profile(machine_profile())
    roles = tmp_path / "cache" / "roles.json"
    HeadRoles.of(np.ones((2, 2), bool), head_dim=32, made_by="a test", checkpoint="x").keep(roles)
    for path in (profile, roles):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_conversation_is_its_owners(tmp_path: Path, offloaded_models: dict[str, Any]) -> None:
    cache = offloaded_models["llama"].new_cache()
    offloaded_models["llama"].generate(
        torch.tensor([[1, 2, 3]]), past_key_values=cache, max_new_tokens=1
    )
    cache.save(tmp_path / "talk.safetensors")
    assert (tmp_path / "talk.safetensors").stat().st_mode & 0o777 == 0o600


def test_a_folder_is_asked_without_changing_it(umask: int, tmp_path: Path) -> None:
    assert default_mode(tmp_path) == 0o666 & ~umask
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_another_user() -> None:
    """May use the conversion, or is told that it cannot be read, not that it cannot be written."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)  # pytest's own folders are closed
        path = Path(name) / "tiny.gguf"
        write_gguf(path, make_tiny_model("llama"), byte_tokenizer())
        path.chmod(0o644)
        done = run_program(ASKS, path, NOBODY, OFFLOAD_CACHE=f"{name}/cache")
    assert done.returncode == 0, done.stderr
    found, *refused = done.stdout.splitlines()
    assert found.startswith(f"{name}/cache/models/"), found
    assert len(refused) == 2
    for line in refused:
        assert line.startswith("PermissionError: cannot read the converted model"), line
        assert "cannot write" not in line
