"""How far something is that loading a model waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from typing import Any


class Progress:
    """Log lines when something begins and ends; on a terminal with a bar, which does not stay.

    Args:
        title: of the bar.
        begins: logged with the first call; its %d is how much there is to do.
        ended: logged at the end, if anything was done; its %.1f is seconds.
        is_shown: False: not by this process.
    """

    def __init__(
        self, logger: Logger, *, title: str, begins: str, ended: str, is_shown: bool = True
    ) -> None:
        self._logger, self._title = logger, title
        self._begins, self._ended = begins, ended
        self._is_shown = is_shown
        self._bar: Any = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """So much of it is done."""
        if not self._is_shown:
            return
        if self._bar is None:
            from transformers.utils.logging import tqdm

            self._done = done
            self._logger.info(self._begins, total - done)
            self._bar = tqdm(desc=self._title, total=total, initial=done, leave=False, disable=None)
        self._bar.update(done - self._done)
        self._done = done

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around the work."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()
        if self._bar is not None:
            self._logger.info(self._ended, time.perf_counter() - start)
