"""The lock of a model: one thread at a time runs it, or changes what it keeps.

The native kernels let go of the GIL and work in scratch memory of their model; sequences share one
pool of pages. So a whole `generate()`, a whole forward pass and every operation of a cache takes
`RunLock.lock`, and other threads wait.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


class RunLock:
    """The lock of one model.

    Attributes:
        lock: for `with run_lock.lock:`. A thread that has it may take it again: what transformers
            calls back during a generation (streamers, logits processors) may use the model. Ctrl-C
            ends the main thread's waiting; take it outside of `shielded()`.
        number: locks of several models are taken in the order of these.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        # The lock itself, not a context manager of ours around it: ctrl-C could come between the
        # lines of that, and the lock would be held for ever.
        self.lock: threading.RLock | _LostLock = threading.RLock()
        _all_locks.add(self)

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock."""
        return not isinstance(self.lock, _LostLock) and bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def _after_fork(self) -> None:
        # Who holds a lock here, but for the thread that forked, stayed in the parent.
        if self.lock.acquire(blocking=False):
            self.lock.release()
        else:
            self.lock = _LostLock()


class _LostLock:
    """In a forked child, in place of a lock that a thread of the parent held."""

    def acquire(self, blocking: bool = True) -> bool:
        return self._refuse() if blocking else False

    def release(self) -> None:
        """Nobody has it."""

    def __enter__(self) -> bool:
        return self._refuse()

    def __exit__(self, *exc_info: object) -> None:
        """Nobody has it."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "this process was forked while another thread was running the model, which is therefore"
            " in the middle of a step here; load the model again after the fork, or fork while no"
            " thread runs it"
        )


_numbers = itertools.count()
_all_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def locked(forward: _Method) -> _Method:
    """A forward pass of an `OffloadedModel`, in its thread's turn.

    What it keeps for later calls are ordinary tensors, whichever mode of torch it is called in: a
    tensor made under `torch.inference_mode()` could never be written outside of it.
    """

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._offload.run_lock.lock, torch.inference_mode(False), torch.no_grad():
            return forward(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def _after_fork() -> None:
    for run_lock in _all_locks:
        run_lock._after_fork()


os.register_at_fork(after_in_child=_after_fork)
