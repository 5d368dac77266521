"""Saved sessions in a folder, by their ids: a file of each, and parts of long ones beside it."""

from __future__ import annotations

import errno
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.runtime.file_parts import parts_of, session_of
from offload.runtime.saving import SessionFiles, saved_rows, whole_file
from offload.system.checked_file import CheckedReader
from offload.system.errors import SessionMiss
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
    """A session of the folder.

    Attributes:
        num_bytes: of its file and all parts.
        used: seconds since 1970.
    """

    session_id: str
    num_bytes: int
    used: float


class SessionFolder:
    """A folder, which is made if it is not there. Several processes may use one.

    A part is written before the file that names it, and goes when no file names it any more.

    Args:
        limit_bytes: of all files together: sessions not used for the longest time go. None: no
            limit.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"the limit of a folder must not be negative, got {limit_bytes}")
        self.folder, self._limit_bytes = Path(folder), limit_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._latest_ns = 0  # of all that was seen: the clock may be set back
        self.sessions()
        self._remove_abandoned()

    def path(self, session_id: str) -> Path:
        """Where a session is, if it is there.

        Raises:
            ValueError: as `check_session_id`.
        """
        return self.folder / f"{check_session_id(session_id)}{_SUFFIX}"

    def sessions(self) -> list[SavedSession]:
        """Those that are there, the one that was not used for the longest time first; none while
        the folder itself is gone."""
        found, entries = list[tuple[str, os.stat_result]](), list[os.DirEntry[str]]()
        of_parts = defaultdict[str | None, int](int)
        with suppress(FileNotFoundError), os.scandir(self.folder) as scanned:
            entries += scanned
        for entry in entries:
            session_id = entry.name.removesuffix(_SUFFIX)
            with suppress(OSError):  # gone meanwhile
                if entry.name.endswith(_SUFFIX) and _ID.fullmatch(session_id):
                    status = entry.stat()
                    self._latest_ns = max(self._latest_ns, status.st_mtime_ns)
                    found.append((session_id, status))
                elif (owner := session_of(entry.name)) is not None:
                    of_parts[owner] += entry.stat().st_size
        sessions = [
            SavedSession(session_id, status.st_size + of_parts[session_id], status.st_mtime)
            for session_id, status in found
        ]
        return sorted(sessions, key=lambda each: (each.used, each.session_id))

    def part_names(self, session_id: str) -> list[str]:
        """Those of the session's own parts that its file names, and that are there.

        Raises:
            SessionMiss: the file is damaged, or not there.
        """
        with CheckedReader(self.path(session_id)) as reader:
            saved_rows(reader)  # another format might name them in another way
            names = [part.name for part in parts_of(reader)]
        own = [name for name in names if session_of(name) == session_id]
        return [name for name in own if os.path.exists(self.folder / name)]  # no OSError

    def write(self, session_id: str, files: SessionFiles) -> Iterator[None]:
        """Write a session in steps, as `CheckedFile.write`. It is as it was until the last.

        Raises:
            OSError: as of any writing, and where it is larger than the limit.
        """
        path, before = self.path(session_id), list[str]()
        with suppress(SessionMiss):
            before = self.part_names(session_id)
        names = [part.name for part in files.parts]
        there = names[:-1] if files.new else names
        num_bytes = files.file.num_bytes + (files.new.num_bytes if files.new else 0)
        self._make_room(session_id, num_bytes + sum(map(self._size, there)))
        try:
            if files.new is not None:
                yield from files.new.write(self.folder / names[-1])
            yield from files.file.write(path)
        except BaseException:
            with suppress(SessionMiss):
                before = self.part_names(session_id)
            if files.new is not None and names[-1] not in before:
                self._unlink(names[-1])
            raise
        for name in {*before} - {*names}:
            self._unlink(name)
        for name in names:  # others may have written or removed the session meanwhile
            if not (self.folder / name).exists():
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder / name))
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
        is_there = True
        try:
            self.path(session_id).unlink()
        except FileNotFoundError:
            is_there = False
        self._unlink_parts({session_id})  # which a crash may have left alone
        if not is_there:
            raise FileNotFoundError(f"there is no session {session_id!r} in {self.folder}")

    def num_tokens(self, session_id: str) -> int:
        """By the file's header.

        Raises:
            SessionMiss: the header is damaged, or it is not there.
        """
        with CheckedReader(self.path(session_id)) as reader:
            return sum(int(row["kv_len"]) for row in saved_rows(reader))

    def export(self, session_id: str, to: Path) -> None:
        """Copy a session out of the folder, into one file, once it is sure that it is whole.

        Raises:
            SessionMiss: it is damaged, or not there. OSError: `to` cannot be written.
        """
        with CheckedReader(self.path(session_id)) as reader:
            for _ in whole_file(reader).write(to):
                pass

    def import_(self, source: Path, session_id: str) -> None:
        """Copy a session into the folder, as one file.

        Raises:
            SessionMiss: it is damaged, or none. OSError: there is no room.
        """
        with CheckedReader(source) as reader:
            for _ in self.write(session_id, SessionFiles(whole_file(reader))):
                pass

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
        total, gone = num_bytes + sum(each.num_bytes for each in others), set[str]()
        try:
            for each in others:
                if total <= self._limit_bytes:
                    break
                self.path(each.session_id).unlink(missing_ok=True)
                gone.add(each.session_id)
                total -= each.num_bytes
        finally:
            if gone:
                self._unlink_parts(gone)

    def _remove_abandoned(self) -> None:
        """What processes that were killed have left: files aside, and parts that no file names."""
        of_sessions = defaultdict[str | None, list[str]](list)
        for pattern in (f".*{_SUFFIX}.*.tmp", ".*.part.*.tmp", "*.part"):
            for path in self.folder.glob(pattern):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                        of_sessions[session_of(path.name)].append(path.name)
                        if path.name.endswith(".tmp"):
                            path.unlink()
        of_sessions.pop(None, None)
        for session_id, names in of_sessions.items():
            named = list[str]()
            try:
                named = self.part_names(str(session_id))
            except SessionMiss:
                if self.path(str(session_id)).exists():  # it may be of another version
                    continue
            for name in {*names} - {*named}:
                self._unlink(name)

    def _unlink_parts(self, session_ids: Set[str]) -> None:
        """All parts of some sessions, whether a file names them or not."""
        for path in self.folder.glob("*.part"):  # once: the folder may have many files
            if session_of(path.name) in session_ids:
                self._unlink(path.name)

    def _size(self, name: str) -> int:
        with suppress(OSError):
            return (self.folder / name).stat().st_size
        return 0

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / name).unlink()
