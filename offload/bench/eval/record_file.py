"""Answers on disk, a line each: what was measured survives whatever ends the run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from offload.bench.eval.sample import Item, Key

Record = dict[str, Any]
_BEGINNING = b'{"options": '


class RecordFile:
    """A JSON-lines file: the run's options first, then records, each written when it is known.

    As a context manager: until it is left, no other run can use the file.

    Args:
        path: made if it is not there; None keeps the records in memory only.
        options: of the run; a file of a run with others is refused.

    Attributes:
        records: those of the file, then the added ones.

    Raises:
        ValueError: the file is of another run, or no such file.
        BlockingIOError: another run uses the file.
    """

    def __init__(self, path: Path | None, options: Mapping[str, Any]) -> None:
        self.records: list[Record] = []
        self._file: IO[bytes] | None = None
        self._header = ""  # what is still to be written before a record
        if path is None:
            return
        self._file = file = path.open("a+b")
        try:
            _lock(path, file)
            self._read(path, file, json.loads(json.dumps(options)))
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # and with it the lock

    def _read(self, path: Path, file: IO[bytes], options: dict[str, Any]) -> None:
        """Take the file's records, and cut it after its last whole line."""
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            half = lines.pop()  # what was being written when the run was killed
            if not lines and not half.startswith(_BEGINNING):
                raise ValueError(f"{path} is no file of offload eval")
        if not lines:
            file.truncate(0)
            self._header = json.dumps({"options": options}) + "\n"  # comes with a record
            return
        try:
            header, *self.records = [json.loads(line) for line in lines]
            others = header["options"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no file of offload eval: {error}") from error
        differing = [n for n in {**options, **others} if others.get(n) != options.get(n)]
        if differing:
            name = differing[0]
            then, now = (_short(x.get(name)) for x in (others, options))
            raise ValueError(
                f"{path} was made with {name} = {then}, but this run has {now}; give another "
                "--resume file, or the same options"
            )
        file.truncate(sum(map(len, lines)))  # whole lines stay where they are

    @property
    def keys(self) -> set[Key]:
        """Keys of the records."""
        return {(record["task"], record["length"], record["index"]) for record in self.records}

    def add(self, item: Item, measured: Mapping[str, Any]) -> None:
        """Keep what was measured of an item, on disk before this returns."""
        record = {"task": item.task, "length": item.length, "index": item.index, **measured}
        self.records.append(record)
        if self._file is not None:
            self._file.write((self._header + json.dumps(record) + "\n").encode())
            self._file.flush()
            self._header = ""


def _lock(path: Path, file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"another run writes to {path}; wait until it ends, or give another --resume file"
        ) from None


def _short(value: Any) -> str:
    """For messages: of policies their names."""
    is_nested = isinstance(value, dict) and all(isinstance(x, dict) for x in value.values())
    return ", ".join(value) if is_nested else repr(value)
