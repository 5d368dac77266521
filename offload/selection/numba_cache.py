"""Numba's cache of compiled callbacks, emptied when a source of theirs changes.

Numba looks at the file that a function stands in. What it takes from other files, constants and
inlined functions, would stay as it was: another rotation of the keys than the one they were coded
with, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path


def drop_stale(folder: Path, others: Sequence[Path] = ()) -> None:
    """Delete what Numba has compiled below `folder` from other sources than are there now.

    Args:
        others: folders of sources that those import from.
    """
    sources = sorted({path for place in (folder, *others) for path in place.rglob("*.py")})
    digest = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    stamp = folder / "__pycache__" / "numba.sha256"
    try:
        if stamp.exists() and stamp.read_text("ascii") == digest:
            return
        for compiled in folder.rglob("*.nb[ci]"):
            compiled.unlink(missing_ok=True)  # another process may do the same
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest, "ascii")
    except OSError:
        return  # where nothing can be written Numba keeps its cache elsewhere
