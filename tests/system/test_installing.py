"""What messages tell users to install; and a type checker finds what `make venv` has installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
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
    assert missing_extra("perf", "it") is None or importlib.util.find_spec("matplotlib") is None


def test_a_python_without_pip_has_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    assert install_command("x") == ["uv", "pip", "install", "--python", sys.executable, "x"]


def test_no_message_names_what_pypi_lacks() -> None:
    for path in PACKAGES.rglob("*.py"):
        assert "pip install 'offload" not in path.read_text(encoding="utf-8"), path


ROOT = Path(__file__).parents[2]
PROGRAM = """from cpu_ops.native import isa_name
from offload import OffloadedModel, __version__

print(__version__, isa_name(), OffloadedModel.__name__)
"""


@pytest.mark.slow
def test_mypy_finds_the_editable_install(tmp_path: Path) -> None:
    """`mypy --strict` of a program outside of the repository, with the options of the Makefile."""
    pytest.importorskip("mypy", reason="the extra dev is not installed")
    options = re.search(r"^EDITABLE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert options is not None
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str | Path, **more: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment | more,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", "venv")
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "venv" / "lib" / version / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps")
    pip = (*pip, "--no-build-isolation", "--no-compile", *options[1].split())
    run(*pip, "-e", ROOT, OFFLOAD_NO_EXTENSION="1")
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = run(
        sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "program.py"
    )
    assert "Success" in checked
    assert run(python, "program.py").endswith("OffloadedModel\n")
