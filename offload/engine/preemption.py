"""Requests that make room for others, on disk, and go on later with the same tokens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from offload.engine.request import Request
from offload.runtime.file_parts import FilePart
from offload.runtime.runtime import Runtime
from offload.runtime.saving import file_of, read_in_parts

_ON_DISK = "/var/tmp"  # "/tmp" is often memory


class Preempted:
    """Sequences of running requests, in a temporary folder until `close`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._on_disk: dict[Request, tuple[FilePart, ...]] = {}  # of sessions, which stay so

    def save(self, request: Request) -> None:
        """Take a request's sequence out of memory.

        Raises:
            OSError: no room on the disk; it has its sequence still.
        """
        sequences = self._runtime.sequences
        assert request.seq is not None
        for _ in file_of(sequences, [request.seq]).write(self._path(request)):
            pass
        self._on_disk[request] = sequences.on_disk.parts(request.seq)
        sequences.free([request.seq])
        request.seq, request.is_preempted = None, True

    def restore(self, request: Request) -> Iterator[None]:
        """Give it back, in parts.

        Raises:
            SessionMiss: it does not fit into memory, or the file was damaged.
        """
        most_tokens = self._runtime.max_context
        (row,), _ = yield from read_in_parts(
            self._runtime.sequences, self._path(request), most_tokens
        )
        request.seq, request.is_preempted = row.seq, False
        self._runtime.sequences.on_disk.note(row.seq, self._on_disk[request])
        self.forget(request)

    def forget(self, request: Request) -> None:
        """It goes on, or has ended."""
        self._on_disk.pop(request, None)
        if self._folder is not None:
            self._path(request).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _path(self, request: Request) -> Path:
        if self._folder is None:
            folder, prefix = None if "TMPDIR" in os.environ else _ON_DISK, "offload-preempted-"
            try:
                self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
            except OSError:  # it is not there, or may not be written to
                self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        return Path(self._folder.name, f"{id(request)}.safetensors")
