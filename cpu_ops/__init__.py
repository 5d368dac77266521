"""CPU operators of offload: checked calls (`native`) and float64 references (`reference`)."""

from hashlib import sha256
from pathlib import Path

import cpu_ops._native

_bindings = sorted((Path(__file__).parents[1] / "cpp/bindings").glob("*.[ch]*"))  # of a checkout
_digest = sha256(b"".join(source.read_bytes() for source in _bindings)).hexdigest()
if _bindings and getattr(cpu_ops._native, "BINDINGS_DIGEST", None) != _digest:
    raise ImportError("cpu_ops/_native was built from other sources than these; run: make build")
