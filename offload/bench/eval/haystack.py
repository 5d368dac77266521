"""Prose to hide needles in: files that the user names, or text that every machine has."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from offload.system.stdlib_text import stdlib_paragraphs
from offload.system.text_file import read_text_file

# Also behind the full stops and commas of Chinese and Japanese, which have no spaces.
_WORD_END = re.compile("\\s+|(?<=[\u3002\uff01\uff1f\u3001\uff0c])")


def prose_text(path: Path | None, option: str = "--haystack") -> str:
    """The text of a file, of the .txt and .md files of a folder in order of their names, or of the
    docstrings of Python's library.

    Raises:
        FileNotFoundError, ValueError: no such file, one that is not UTF-8, no text in it or in
            the folder; names the file or `option`.
    """
    if path is None:
        return "\n\n".join(stdlib_paragraphs())
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file()
        )
    text = "\n\n".join(read_text_file(file) for file in files)
    if not text.strip():
        raise ValueError(f"{option} {path}: no text there (a file, or a folder of .txt, .md)")
    return text


def described(path: Path | None, option: str = "--haystack") -> dict[str, str | None]:
    """Where `prose_text` is from, and which text it was: for settings of a run."""
    digest = hashlib.sha256(prose_text(path, option).encode()).hexdigest()
    return {"path": None if path is None else str(path), "sha256": digest}


def prose_words(path: Path | None) -> list[str]:
    """The words of `prose_text`; of Chinese and Japanese the parts of sentences."""
    return [word for word in _WORD_END.split(prose_text(path)) if word]
