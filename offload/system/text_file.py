"""Text that a user names: UTF-8, without the mark that some editors put in front of it."""

from __future__ import annotations

import os
from pathlib import Path


def read_text_file(path: str | Path) -> str:
    """What is in a file.

    Raises:
        FileNotFoundError, OSError: there is none, or it cannot be read.
        ValueError: as `decoded`.
    """
    return decoded(Path(path).expanduser().read_bytes(), str(path))


def decoded(content: bytes, source: str) -> str:
    """UTF-8 with "\\n" between lines, as text.

    Raises:
        ValueError: not UTF-8; names the source and the first byte that is not.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # error.object has no byte order mark; positions are those of the file.
        place = error.start + len(content) - len(error.object)
        raise ValueError(
            f"{source} is not UTF-8: byte {content[place]:#04x} at position {place:,}; convert it, "
            "such as with iconv -t UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def argument_text(argument: str, option: str) -> str:
    """What a command line has behind `option`.

    Raises:
        ValueError: as `decoded`; Python keeps bytes that are not UTF-8 as surrogates.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        return decoded(os.fsencode(argument), option)
    return argument
