"""Answers on disk, a line each: what was measured survives whatever ends the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


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
        self._path = path
        if path is None:
            return
        options = json.loads(json.dumps(options))
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # what was being written when the run was killed
        if not lines:
            path.write_text(json.dumps({"options": options}) + "\n", "utf-8")
            return
        try:
            header, *self.records = [json.loads(line) for line in lines]
            others = header["options"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of offload eval: {error}") from error
        for name in {**others, **options}:
            if others.get(name) != options.get(name):
                raise ValueError(
                    f"{path} was made with {name}={others.get(name)!r}, but this run has "
                    f"{name}={options.get(name)!r}; give another --resume file, or the same options"
                )
        path.write_bytes(b"".join(lines))

    def add(self, record: Record) -> None:
        """Keep a record, on disk before this returns."""
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
