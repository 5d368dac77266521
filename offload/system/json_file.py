"""JSON files that a user names: what says that one is missing, and what that it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(
    path: str | Path, kind: str, *, hint: str = "", damaged: str = "is not JSON: {}"
) -> Any:
    """What is in a file.

    Args:
        kind: what errors call it, before its path.
        hint: behind the path of a missing file.
        damaged: behind that of one that is not JSON, with what is wrong in the place of {}.

    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON; names the file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no {kind} {path}{hint}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is not UTF-8
        raise ValueError(f"{kind} {path} {damaged.format(error)}") from error
