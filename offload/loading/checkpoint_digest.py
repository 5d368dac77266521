"""Which model a folder holds, in a few milliseconds: to tell runs on other weights apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")  # of what loading reads
_OURS = b'"format": "offload-'  # such as a roles file that was written beside the weights
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 256


def checkpoint_digest(folder: Path) -> str:
    """A digest of config, tokenizer and weights: copies have the same, other weights another.

    Files are hashed by name, size and 256 blocks of 4 KiB at equal distances, which is all of a
    file up to 1 MiB: a fine-tuned model differs in most of them, while the headers of its weights
    may not, and the time of a file changes with a copy. What differs between the blocks only is not
    noticed. JSON files that `offload` has written there are left out.
    """
    digest = hashlib.sha256()
    files = (path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    for path in sorted(files):
        if path.suffix == ".json" and _is_ours(path):
            continue
        _add_blocks(digest, path, path.name)
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The same of one file, whatever its name."""
    digest = hashlib.sha256()
    _add_blocks(digest, path, "")
    return digest.hexdigest()[:16]


def _add_blocks(digest: hashlib._Hash, path: Path, name: str) -> None:
    num_bytes = path.stat().st_size
    digest.update(f"{name} {num_bytes}\n".encode())
    step = max(_BLOCK_BYTES, num_bytes // _NUM_BLOCKS)
    with path.open("rb") as file:
        for place in range(0, num_bytes, step):
            file.seek(place)
            digest.update(file.read(_BLOCK_BYTES))


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return _OURS in file.read(64)
