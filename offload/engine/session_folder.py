"""Saved sessions in a folder, one file each, by their ids."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.runtime.saving import saved_rows
from offload.system.checked_file import CheckedFile, CheckedReader
from offload.system.memory import format_bytes

_SUFFIX = ".safetensors"
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_ABANDONED_SECONDS = 3600.0  # no file takes so long to write


def check_session_id(session_id: object) -> str:
    """The id, which can be the name of a file.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(session_id, str) or not _ID.fullmatch(session_id):
        raise ValueError(
            "a session id must be 1 to 128 characters of A-Z a-z 0-9 . _ -, the first of them no "
            f"dot, got {session_id if session_id is None else str(session_id)[:200]!r}"
        )
    return session_id


@dataclass(frozen=True)
class SavedSession:
    """A file of the folder.

    Attributes:
        used: seconds since 1970.
    """

    session_id: str
    num_bytes: int
    used: float


class SessionFolder:
    """A folder, which is made if it is not there. Several processes may use one.

    Args:
        limit_bytes: of all files together: those not used for the longest time go. None: no limit.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"the limit of a folder must not be negative, got {limit_bytes}")
        self.folder, self._limit_bytes = Path(folder), limit_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._latest_ns = 0  # of all that was seen: the clock may be set back
        self.sessions()
        for path in self.folder.glob(f".*{_SUFFIX}.*.tmp"):  # of processes that were killed
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()

    def path(self, session_id: str) -> Path:
        """Where a session is, if it is there.

        Raises:
            ValueError: as `check_session_id`.
        """
        return self.folder / f"{check_session_id(session_id)}{_SUFFIX}"

    def sessions(self) -> list[SavedSession]:
        """Those that are there, the one that was not used for the longest time first; none while
        the folder itself is gone."""
        found, entries = list[SavedSession](), list[os.DirEntry[str]]()
        with suppress(FileNotFoundError), os.scandir(self.folder) as scanned:
            entries += scanned
        for entry in entries:
            session_id = entry.name.removesuffix(_SUFFIX)
            if entry.name.endswith(_SUFFIX) and _ID.fullmatch(session_id):
                with suppress(OSError):  # gone meanwhile
                    status = entry.stat()
                    self._latest_ns = max(self._latest_ns, status.st_mtime_ns)
                    found.append(SavedSession(session_id, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: (each.used, each.session_id))

    def write(self, session_id: str, file: CheckedFile) -> Iterator[None]:
        """Write a session in steps, as `CheckedFile.write`.

        Raises:
            OSError: as of any writing, and where it is larger than the limit.
        """
        path = self.path(session_id)
        self._make_room(session_id, file.num_bytes)
        yield from file.write(path)
        self.touch(session_id)

    def touch(self, session_id: str) -> None:
        """It is used now, after all others."""
        self._latest_ns = max(time.time_ns(), self._latest_ns + 1_000_000)
        with suppress(OSError):
            os.utime(self.path(session_id), ns=(self._latest_ns, self._latest_ns))

    def used(self, session_id: str) -> float:
        """Seconds since 1970; 0 if it is not there."""
        with suppress(OSError):
            return self.path(session_id).stat().st_mtime
        return 0.0

    def remove(self, session_id: str) -> None:
        """FileNotFoundError: it is not there."""
        try:
            self.path(session_id).unlink()
        except FileNotFoundError:
            message = f"there is no session {session_id!r} in {self.folder}"
            raise FileNotFoundError(message) from None

    def num_tokens(self, session_id: str) -> int:
        """By the file's header.

        Raises:
            SessionMiss: the header is damaged, or it is not there.
        """
        with CheckedReader(self.path(session_id)) as reader:
            return sum(int(row["kv_len"]) for row in saved_rows(reader))

    def export(self, session_id: str, to: Path) -> None:
        """Copy a session out of the folder, once it is sure that it is whole.

        Raises:
            SessionMiss: it is damaged, or not there. OSError: `to` cannot be written.
        """
        _copy(self.path(session_id), to)

    def import_(self, source: Path, session_id: str) -> None:
        """Copy a session into the folder.

        Raises:
            SessionMiss: it is damaged, or none. OSError: there is no room.
        """
        path = self.path(session_id)
        with CheckedReader(source) as reader:
            self._make_room(session_id, reader.num_bytes)
        _copy(source, path)
        self.touch(session_id)

    def _make_room(self, session_id: str, num_bytes: int) -> None:
        """Let a file of so many bytes be written in the place of a session's."""
        if self._limit_bytes is None:
            return
        if num_bytes > self._limit_bytes:
            raise OSError(
                f"session {session_id!r} is {format_bytes(num_bytes)}, more than the limit of "
                f"{format_bytes(self._limit_bytes)} of {self.folder}"
            )
        others = [each for each in self.sessions() if each.session_id != session_id]
        total = num_bytes + sum(each.num_bytes for each in others)
        for each in others:
            if total <= self._limit_bytes:
                break
            self.path(each.session_id).unlink(missing_ok=True)
            total -= each.num_bytes


def _copy(source: Path, to: Path) -> None:
    with CheckedReader(source) as reader:
        saved_rows(reader)
        for _ in reader.copy().write(to):
            pass
