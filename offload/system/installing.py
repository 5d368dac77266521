"""Commands that install what is missing, for the interpreter that misses it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

_PACKAGE = "offload"


def install_command(*arguments: str) -> list[str]:
    """The words of `pip install` with these arguments, or of uv's where this Python has no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", *arguments]
    return ["uv", "pip", "install", "--python", sys.executable, *arguments]


def missing_extra(extra: str, needs: str) -> str | None:
    """A message that `needs` an extra, with the command for those of its packages that are missing.

    It names the packages themselves: `offload[extra]` would be looked for on PyPI. None: nothing is
    missing, or this package is not installed.
    """
    missing = [str(wanted) for wanted in _of_extra(extra) if not _is_installed(wanted)]
    if not missing:
        return None
    return f"{needs} needs the extra {extra!r}; run: {shlex.join(install_command(*missing))}"


def _of_extra(extra: str) -> Iterator[Requirement]:
    """What the metadata of this package, which may have come as a clone or a wheel, says of it."""
    try:
        of_package = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return
    for wanted in map(Requirement, of_package):
        marker, wanted.marker = wanted.marker, None
        if marker is None or not marker.evaluate({"extra": extra}):
            continue
        if wanted.name == _PACKAGE:
            for named in wanted.extras:
                yield from _of_extra(named)
        else:
            yield wanted


def _is_installed(wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False
