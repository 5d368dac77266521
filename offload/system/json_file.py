"""JSON files from outside: what says that one is missing, and what that it is damaged."""

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
        ValueError: a folder, or not JSON; names the file.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"{kind} {path} is a folder; give a file")
    if not file.is_file():
        raise FileNotFoundError(f"no {kind} {path}{hint}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also what is not UTF-8, or nested 10**6 deep
        raise ValueError(f"{kind} {path} {damaged.format(error)}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """What is in a file of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: no JSON object; names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"missing {path.name} in {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
