"""constraints.txt on a machine whose only index is PyPI, with the torch that PyPI has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
CONSTRAINTS = REPOSITORY / "constraints.txt"
INDEX = "https://pypi.org/simple"
# What torch's wheels on PyPI for Linux ask for (Requires-Dist of their METADATA), which the build
# without CUDA that is installed here may not.
OF_TORCH = {"2.13.0": {"triton": "3.7.1"}}
# These come with lm-eval and have no wheel on PyPI.
WITHOUT_WHEEL = ("rouge_score", "sqlitedict", "word2number")


@pytest.fixture(scope="module")
def pins() -> dict[str, Requirement]:
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return specifier.version


def test_torch_brings_what_it_runs_on(pins: dict[str, Requirement]) -> None:
    """Its triton if any, and CUDA's libraries by itself."""
    torch = version_of(pins["torch"])
    assert torch in OF_TORCH, f"say in OF_TORCH what torch {torch} on PyPI asks for"
    assert version_of(pins["triton"]) == OF_TORCH[torch]["triton"]
    assert [name for name in pins if name.startswith(("nvidia-", "cuda-"))] == []
    for text in metadata.requires("torch") or []:
        asked = Requirement(text)
        pin = pins.get(canonicalize_name(asked.name))
        if pin is not None and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            assert asked.specifier.contains(version_of(pin)), f"torch asks for {asked}, not {pin}"


def test_torch_ends_at_what_is_tested(pins: dict[str, Requirement]) -> None:
    found = re.search('"(torch>=.*)"', (REPOSITORY / "pyproject.toml").read_text("utf-8"))
    assert found
    tested = version_of(pins["torch"])
    major, minor, _ = map(int, tested.split("."))
    asked = Requirement(found[1]).specifier
    assert asked.contains(tested)
    assert not asked.contains(f"{major}.{minor + 1}.0")


@pytest.fixture(scope="module")
def pypi_only() -> dict[str, str]:
    """An environment in which pip and uv know nothing of this machine but its certificates."""
    try:
        urllib.request.urlopen(f"{INDEX}/torch/", timeout=20).close()
    except OSError as error:
        pytest.skip(f"{INDEX} cannot be reached: {error}")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHONPATH"))}
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if certificates:
        kept |= {"PIP_CERT": certificates, "SSL_CERT_FILE": certificates}
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": INDEX,
        "UV_NO_CONFIG": "1",
        "UV_DEFAULT_INDEX": INDEX,
        "UV_PYTHON_DOWNLOADS": "never",
    }


def run(environment: dict[str, str], *command: str | Path) -> str:
    result = subprocess.run(
        list(map(str, command)),
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def resolver(
    pypi_only: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str | Path, ...]:
    """uv's, which takes the markers of another Python than its own; pip's does not."""
    folder = tmp_path_factory.mktemp("resolver")
    pip = (sys.executable, "-m", "pip")
    run(pypi_only, *pip, "install", "--quiet", "--target", folder / "uv", "uv")
    wheels = folder / "wheels"
    run(pypi_only, *pip, "wheel", "--no-deps", "-c", CONSTRAINTS, "-w", wheels, *WITHOUT_WHEEL)
    build = folder / "build.txt"
    build.write_text("setuptools\npybind11\n")  # as `make` installs them, beside the package
    options = (
        "--all-extras",
        "--no-build",
        "--find-links",
        wheels,
        "--cache-dir",
        folder / "cache",
    )
    return (folder / "uv/bin/uv", "pip", "compile", "pyproject.toml", build, *options)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_all_of_it_resolves(
    resolver: tuple[str | Path, ...],
    pypi_only: dict[str, str],
    pins: dict[str, Requirement],
    python: str,
) -> None:
    """With all extras and what builds the package; nothing but metadata is downloaded.

    torch's wheels run with glibc 2.28, llguidance's with 2.31.
    """
    told = run(
        pypi_only,
        *(*resolver, "--constraints", CONSTRAINTS, "--python-version", f"{python}.9"),
        *("--python-platform", "x86_64-manylinux_2_31", "--no-header", "--no-annotate"),
    )
    found = dict(line.split("==") for line in told.splitlines())
    torch = version_of(pins["torch"])
    assert found["torch"] == torch
    assert found["triton"] == OF_TORCH[torch]["triton"]
    assert any(name.startswith("nvidia-") for name in found)  # PyPI's own build
    of_python = {"python_version": python, "python_full_version": f"{python}.9"}
    for name, version in found.items():
        pin = pins.get(name)
        if pin is not None and (pin.marker is None or pin.marker.evaluate(of_python)):
            assert version == version_of(pin)
