"""How many threads torch's own operators use, in the thread that asks.

`torch.set_num_threads` is not for this: beside the calling thread's number it sets one for the
process, which every other thread takes at its first operator. A thread's own numbers are OpenMP's
(for ATen and oneDNN) and, in builds of torch that have it, MKL's. They are set in the very
libraries that torch is linked to, as torch itself does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

_forked = False


@contextlib.contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Run torch's operators of this thread on `num_threads` threads, and then on as many as before.

    A build of torch that does not let a thread have its own number goes on as it is, and a warning
    says so once.

    On one thread in a process that was forked after this was imported: OpenMP's other threads stay
    in the parent, and GNU's waits for them in the child for ever.
    """
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before or _forked or (setters := _setters()) is None:
        yield
        return
    set_openmp, set_mkl = setters
    mkl_before = before
    try:
        try:
            set_openmp(num_threads)
            mkl_before = set_mkl(num_threads)  # 0: it followed the process's number
            yield
        finally:
            _restore(set_openmp, before, set_mkl, mkl_before)
    finally:  # again, where Ctrl-C came in between
        _restore(set_openmp, before, set_mkl, mkl_before)


def _restore(
    set_openmp: Callable[[int], Any], before: int, set_mkl: Callable[[int], int], mkl_before: int
) -> None:
    if not _forked:
        set_openmp(before)
        set_mkl(mkl_before)


@functools.cache
def _setters() -> tuple[Callable[[int], Any], Callable[[int], int]] | None:
    """What sets OpenMP's, and MKL's, number of the calling thread; None if torch does not heed it.

    MKL's returns the number before.
    """
    # This finds the functions of the module's libraries, and of those that they are linked to.
    library = ctypes.PyDLL(torch._C.__file__)
    set_openmp = getattr(library, "omp_set_num_threads", None)
    set_mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    if set_mkl is None and not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        set_mkl = _no_mkl
    if set_openmp is not None and set_mkl is not None:
        before = torch.get_num_threads()
        set_openmp(before + 1)
        is_heeded = torch.get_num_threads() == before + 1
        set_openmp(before)
        if is_heeded:
            return set_openmp, set_mkl
    logger.warning(
        "this build of torch has no number of threads for each thread: its operators go on with %d",
        torch.get_num_threads(),
    )
    return None


def _no_mkl(num_threads: int) -> int:
    return num_threads


def _after_fork() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)
