"""One thread at a time loads a model: transformers changes the process while it does.

It sets torch's default dtype, replaces initialisers and fills modules that it made empty. Two
threads at once get each other's, and may leave the dtype of one of them behind.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

_lock = threading.RLock()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around all that loads; torch's default dtype is then as before."""
    with _lock:
        dtype = torch.get_default_dtype()
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # whoever had it stayed in the parent


os.register_at_fork(after_in_child=_after_fork)
