"""Answers on disk, a line each: what was measured survives whatever ends the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.bench.eval.sample import Item, Key

Record = dict[str, Any]
_BEGINNING = b'{"options": '


class RecordFile:
    """A JSON-lines file: the run's options first, then records, each written when it is known.

    Args:
        path: made if it is not there; None keeps the records in memory only.
        options: of the run; a file of a run with others is refused.

    Attributes:
        records: those of the file, then the added ones.

    Raises:
        ValueError: the file is of another run, or no such file.
    """

    def __init__(self, path: Path | None, options: Mapping[str, Any]) -> None:
        self.records: list[Record] = []
        self._path, self._header = path, ""  # what is still to be written before a record
        if path is None:
            return
        options = json.loads(json.dumps(options))
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            half = lines.pop()  # what was being written when the run was killed
            if not lines and not half.startswith(_BEGINNING):
                raise ValueError(f"{path} is no file of offload eval")
        if not lines:
            path.write_bytes(b"")  # or not: there is no such folder; options come with a record
            self._header = json.dumps({"options": options}) + "\n"
            return
        try:
            header, *self.records = [json.loads(line) for line in lines]
            others = header["options"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of offload eval: {error}") from error
        if others != options:
            name = next(n for n in {**options, **others} if others.get(n) != options.get(n))
            then, now = (_short(x.get(name)) for x in (others, options))
            raise ValueError(
                f"{path} was made with {name} = {then}, but this run has {now}; give another "
                "--resume file, or the same options"
            )
        with path.open("r+b") as file:  # whole lines stay where they are, whatever happens now
            file.truncate(sum(map(len, lines)))

    @property
    def keys(self) -> set[Key]:
        """Of the records."""
        return {(record["task"], record["length"], record["index"]) for record in self.records}

    def add(self, item: Item, measured: Mapping[str, Any]) -> None:
        """Keep what was measured of an item, on disk before this returns."""
        record = {"task": item.task, "length": item.length, "index": item.index, **measured}
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._header + json.dumps(record) + "\n")
            self._header = ""


def _short(value: Any) -> str:
    """For messages: of policies their names."""
    is_nested = isinstance(value, dict) and all(isinstance(x, dict) for x in value.values())
    return ", ".join(value) if is_nested else repr(value)
