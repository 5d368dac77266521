"""Signals between steps of bookkeeping, not in the middle of one.

Python runs the handler of a signal at any line, and what it raises (KeyboardInterrupt at ctrl-C,
the time-out of a test runner or server at SIGALRM) ends whatever was going on. Where two lines must
both happen (pages leave the free list, a sequence takes them), handlers wait until they have.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's without enums: 3 µs, not 50
import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = sorted(map(int, signal.valid_signals()))


class _Shield:
    """What handles signals while a shield is open, in front of what did before."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.is_exposed = False
        self.came: list[int] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_exposed:
            self.handlers[signum](signum, frame)
        elif signum not in self.came:
            self.came.append(signum)

    def open(self) -> None:
        handlers = zip(_SIGNALS, map(_signal.getsignal, _SIGNALS), strict=True)
        self.handlers = {signum: handler for signum, handler in handlers if callable(handler)}
        for signum in self.handlers:
            _signal.signal(signum, self)

    def close(self) -> None:
        """Put the handlers back; a signal that comes meanwhile may raise, and the others are put
        back all the same."""
        try:
            while self.handlers:
                signum, handler = next(iter(self.handlers.items()))
                _signal.signal(signum, handler)
                del self.handlers[signum]
        finally:
            if self.handlers:
                self.close()

    def deliver(self) -> None:
        """What came runs now; what one handler raises does not keep the others from it."""
        try:
            while self.came:
                signal.raise_signal(self.came.pop(0))
        finally:
            if self.came:
                self.deliver()

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        try:
            self.is_exposed = True
            self.deliver()
            yield
        finally:
            self.is_exposed = False


@contextlib.contextmanager
def shielded() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """While it is open no handler of a signal runs; those of what came meanwhile run at the end.

    Gives a context manager for parts inside that may be interrupted all the same:

        with shielded() as exposed:
            take()
            try:
                with exposed():
                    work()
            except BaseException:
                give_back()
                raise
            keep()

    An `exposed` part of a shield within a shield is not exposed. Threads other than the main one
    are never interrupted; nothing happens there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield contextlib.nullcontext
        return
    shield = _Shield()
    try:
        shield.open()
        yield shield.exposed
    finally:
        try:
            shield.close()
        finally:
            shield.deliver()


def finish(work: Generator[None, None, T], between: Callable[[], None] = lambda: None) -> T:
    """What `work` returns; `between` is called wherever it stops. Errors and ctrl-C close it."""
    try:
        while True:
            try:
                next(work)
            except StopIteration as done:
                result: T = done.value
                return result
            between()
    finally:
        # Not `contextlib.closing`: in its `__exit__` a second ctrl-C could come before this.
        work.close()
