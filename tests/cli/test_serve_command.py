"""`offload serve`: what is refused before anything is loaded. tests/serve has the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload import OffloadedModel
from offload.cli import app
from offload.loading.checkpoint import check_checkpoint


@pytest.mark.parametrize(
    "option", [("--tensor-parallel-size", "2"), ("--host-bytes-per-sequence", "64MiB")]
)
def test_options_of_one_generation(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["serve", "no-such-model", *option])
    assert result.exit_code == 1
    assert f"{option[0]} is for one generation at a time" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "is_int8"), [([], True), (["--kv-dtype", "bfloat16", "--dtype", "bfloat16"], False)]
)
def test_a_context_without_room_is_kept_as_int8(
    options: list[str],
    is_int8: bool,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What would be refused for its length; unless the dtype was asked for."""
    folder, served = tiny_folders["llama"], list[Any]()

    class Server:
        def __init__(self, load: Callable[[], Any], *_: Any) -> None:
            self.load = load

        def run(self) -> None:
            served.append(self.load())

    monkeypatch.setattr("offload.serve.server.Server", Server)
    most = OffloadedModel.from_pretrained(folder, num_threads=1)
    of_context = most.kv_store.token_bytes * most.config.max_position_embeddings
    weights = check_checkpoint(folder).weight_bytes(None)
    for room, lacks in ((2.0, False), (0.7, True)):
        limit = ["--max-memory", f"cpu={weights + int(room * of_context)}", "--threads", "1"]
        result = CliRunner().invoke(app, ["serve", str(folder), *limit, *options])
        assert result.exit_code == 0, result.output
        told = "--kv-dtype auto: int8, as otherwise" in " ".join(result.output.split())
        assert told == (lacks and is_int8)
        assert served[-1].engine.engine.model.kv_store.format.is_int8 == told
        served[-1].engine.engine.stop()
    assert len(served) == 2


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_fastapi(name: str) -> str:
        if name == "fastapi":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_fastapi)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for module in [name for name in sys.modules if name.startswith("offload.serve")]:
        monkeypatch.delitem(sys.modules, module)
    if hasattr(offload, "serve"):  # as it is, afterwards, and not what is imported here
        monkeypatch.setattr(offload, "serve", offload.serve)
    result = CliRunner().invoke(app, ["serve", "no-such-model"])
    assert result.exit_code == 1
    told = " ".join(result.stderr.split())
    assert f"'serve'; run: {sys.executable} -m pip install 'fastapi>=" in told
    assert "offload[" not in told
