"""`offload serve`: what is refused before anything is loaded. tests/serve has the rest."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

import offload
from offload.cli import app


@pytest.mark.parametrize(
    "option", [("--tensor-parallel-size", "2"), ("--host-bytes-per-sequence", "64MiB")]
)
def test_options_of_one_generation(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["serve", "no-such-model", *option])
    assert result.exit_code == 1
    assert f"{option[0]} is for one generation at a time" in " ".join(result.output.split())


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
