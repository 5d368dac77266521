"""How many threads torch's own operators use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

_forked = False


@contextlib.contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Run torch's own operators on `num_threads` threads, and put its setting back afterwards.

    On one thread in a process that was forked after this was imported: OpenMP's other threads stay
    in the parent, and GNU's waits for them in the child for ever.
    """
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before or _forked:
        yield
        return
    try:
        torch.set_num_threads(num_threads)
        yield
    finally:
        torch.set_num_threads(before)


def _after_fork() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)
