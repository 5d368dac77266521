"""A type checker finds the package where `make venv` has installed it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
