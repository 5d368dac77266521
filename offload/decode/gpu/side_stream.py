"""Work beside a step, on streams of their own that fork and join inside a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """Work beside the step's own: what `Handshake.beside` gives and `join` takes."""

    def __init__(self) -> None:
        self.done: torch.cuda.Event | None = None


class SideStream:
    """A stream that forks from the current one, and is joined by it."""

    def __init__(self) -> None:
        # Before the step's own kernels, where both are ready: it has little to do, and others wait.
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[Beside]:
        work = Beside()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield work
            work.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            work.done.record(self._stream)

    @staticmethod
    def join(work: Beside) -> None:
        if work.done is not None:
            torch.cuda.current_stream().wait_event(work.done)

    def synchronize(self) -> None:
        self._stream.synchronize()
