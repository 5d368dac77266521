"""What messages tell users to install."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from offload.system.installing import install_command, missing_extra

PACKAGES = Path(__file__).parents[2] / "offload"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes packages look as if they were not installed, or gives them another version."""
    version = metadata.version

    def hide(**versions: str | None) -> None:
        def found(name: str) -> str:
            if name in versions and versions[name] is None:
                raise metadata.PackageNotFoundError(name)
            return versions.get(name) or version(name)

        monkeypatch.setattr(metadata, "version", found)

    return hide


def test_an_extra_is_named_by_its_packages(without: Any) -> None:
    without(fastapi=None, uvicorn="0.1")
    told = missing_extra("serve", "offload serve")
    assert told is not None
    before, command = told.split("; run: ")
    assert before == "offload serve needs the extra 'serve'"
    words = shlex.split(command)
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert [re.split("[<>=]", word)[0] for word in words[4:]] == ["fastapi", "uvicorn"]
    assert all(">=" in word for word in words[4:])


def test_an_extra_that_has_another(without: Any) -> None:
    without(fastapi=None, ray=None)
    told = missing_extra("ray", "it")
    assert told is not None
    assert "fastapi>=" in told
    assert "ray[serve]>=" in told
    assert "offload[" not in told


def test_nothing_is_missing(without: Any) -> None:
    without()
    assert missing_extra("plot", "it") is None or importlib.util.find_spec("matplotlib") is None


def test_a_python_without_pip_has_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    assert install_command("x") == ["uv", "pip", "install", "--python", sys.executable, "x"]


def test_no_message_names_what_pypi_lacks() -> None:
    for path in PACKAGES.rglob("*.py"):
        assert "pip install 'offload" not in path.read_text(encoding="utf-8"), path
