"""Ctrl-C between steps of bookkeeping, not in the middle of one.

Python raises KeyboardInterrupt at any line. Where two lines must both happen (pages leave the free
list, a sequence takes them), the interrupt waits until they have.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Shield:
    """What handles ctrl-C while a shield is open, in front of what did before."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.is_exposed = False
        self.came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_exposed:
            self.handler(signum, frame)
        else:
            self.came = True

    def deliver(self) -> None:
        if self.came:
            self.came = False
            signal.raise_signal(signal.SIGINT)

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
    """While it is open ctrl-C has no effect; one that came meanwhile has it at the end.

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
    are never interrupted; nothing happens there, nor where ctrl-C is not handled in Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield contextlib.nullcontext
        return
    shield = _Shield(handler)
    try:
        signal.signal(signal.SIGINT, shield)
        yield shield.exposed
    finally:
        signal.signal(signal.SIGINT, handler)
        shield.deliver()
