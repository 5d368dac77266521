"""CPU operators of offload: checked calls (`native`)."""

from hashlib import sha256
from pathlib import Path

import cpu_ops._native

_folder = Path(__file__).parents[1] / "cpp/bindings"  # of a checkout
_bindings = sorted([*_folder.glob("[a-z]*.cpp"), *_folder.glob("[a-z]*.h")])  # no editor's files
_digest = sha256(b"".join(source.read_bytes() for source in _bindings)).hexdigest()
if _bindings and getattr(cpu_ops._native, "BINDINGS_DIGEST", None) != _digest:
    _how = "python setup.py build_ext --inplace --force"
    raise ImportError(f"cpu_ops/_native was built from other sources than these; run: {_how}")
