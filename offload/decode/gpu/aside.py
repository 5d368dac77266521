"""Steps that a thread makes and captures while others of the same decoder run."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.prepared_steps import PreparedSteps

logger = logging.getLogger(__name__)

# How long the thread may keep the interpreter from a step: it only launches, too.
_SWITCH_SECONDS = 0.0005


class StepsAside:
    """Steps of `placement`, made by `make` and then captured in a thread that begins at once."""

    def __init__(
        self,
        placement: HeadPlacement,
        make: Callable[[], PreparedSteps],
        capture: Callable[[PreparedSteps], None],
        device: torch.device,
    ) -> None:
        self.placement = placement
        self._make, self._capture = make, capture
        self._has_buffers = threading.Event()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._steps: PreparedSteps | None = None
        self._thread = threading.Thread(target=self._run, name="steps aside")
        _wait_before_forks()
        _running.add(self)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait_for_buffers(self) -> None:
        """Until they have their memory: what is free is free for others then."""
        self._has_buffers.wait()

    def wait(self) -> PreparedSteps | None:
        """The steps; None: they could not be made, or the process was forked meanwhile."""
        self._thread.join()
        return self._steps

    def _run(self) -> None:
        try:
            with (
                _quick_switches(),
                torch.inference_mode(False),
                torch.no_grad(),
                torch.cuda.stream(self._stream),
            ):
                self._steps = self._made()
        except Exception as error:
            logger.debug("steps could not be made beside others: %s", error)
        finally:
            self._has_buffers.set()
            _running.discard(self)

    def _made(self) -> PreparedSteps:
        """Where captures fail nothing is closed: the attention would forget what a step needs that
        others are in the middle of (`Coprocessor.close`). No thread of a coprocessor has begun.
        """
        steps = self._make()
        self._has_buffers.set()
        self._capture(steps)
        return steps


_running: weakref.WeakSet[StepsAside] = weakref.WeakSet()
_switching = threading.Lock()
_before: list[float] = []  # the interval of each thread that has changed it


@contextmanager
def _quick_switches() -> Iterator[None]:
    with _switching:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_before[-1], _SWITCH_SECONDS))
    try:
        yield
    finally:
        with _switching:
            interval = _before.pop()
            if not _before:
                sys.setswitchinterval(interval)


_waits_before_forks = False


def _wait_before_forks() -> None:
    """A child has no other thread than the one that forks, and locks stay as they are."""
    global _waits_before_forks
    if not _waits_before_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_wait_for_all)
        _waits_before_forks = True


def _wait_for_all() -> None:
    for aside in [*_running]:
        if aside._thread is not threading.current_thread():
            aside.wait()
