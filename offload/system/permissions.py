"""Permissions of files that a library makes private, though they are as public as their folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from uuid import uuid4


def default_mode(folder: Path) -> int:
    """The permissions of a file that is made in `folder` now: by the umask, or by the folder's own
    default. The umask of a process cannot be read without changing it for all its threads."""
    probe = folder / f".mode-{uuid4().hex}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        return os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()


def share_by_umask(folder: Path, pattern: str = "*") -> None:
    """Give the files of `folder` the permissions of any file made there; safetensors and
    `tempfile` leave them to their owner alone."""
    mode = default_mode(folder)
    for path in folder.glob(pattern):
        with contextlib.suppress(PermissionError):  # a file of somebody else was not written now
            if path.is_file() and not path.is_symlink():
                path.chmod(mode)
