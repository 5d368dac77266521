"""Prose to hide needles in: files that the user names, or text that every machine has."""

from __future__ import annotations

from pathlib import Path

from offload.system.stdlib_text import stdlib_paragraphs

DEFAULT_HAYSTACK = "docstrings of Python's library"


def prose_words(path: Path | None) -> list[str]:
    """The words of a file, of the .txt and .md files of a folder in order of their names, or of the
    docstrings of Python's library.

    Raises:
        FileNotFoundError, ValueError: no such file, no text in it or in the folder.
    """
    if path is None:
        return " ".join(stdlib_paragraphs()).split()
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
    words = " ".join(file.read_text("utf-8", errors="replace") for file in files).split()
    if not words:
        raise ValueError(f"--haystack {path}: no text there (a file, or a folder of .txt, .md)")
    return words
