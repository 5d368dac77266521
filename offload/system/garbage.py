"""Python's garbage collector stays away from the modules of a program that starts."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """Collect nothing in here, and never look at what is there at the end.

    torch and transformers bring 600,000 objects, none of them garbage. The collector walks them
    many times while they are made: that is a fifth of the CPU time of a start.

    For commands, not for a library: cycles that are garbage at the end stay in memory. Nothing
    changes where torch is imported already, and the process is not a fresh one.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
