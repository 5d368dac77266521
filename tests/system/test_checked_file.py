"""Files with checksums that are written in steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from offload.system.checked_file import CheckedFile, CheckedReader, Entry


def test_two_that_are_written_to_one_path(tmp_path: Path) -> None:
    """In turns, as two models in one process may: the last one is there, whole."""
    files = [CheckedFile({"by": str(n)}, [Entry.of("x", np.full(9, n))]) for n in range(2)]
    path = tmp_path / "session"
    for _ in itertools.zip_longest(*(file.write(path) for file in files)):
        pass
    with CheckedReader(path) as reader:
        assert reader.metadata["by"] == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["session"]
