"""Progress bars of transformers that leave nothing on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def passing_bars() -> Iterator[None]:
    """transformers' bars go away when they are done, and show on a terminal only."""
    from transformers.utils import logging

    before: Any = None

    def make(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        options = {"leave": False, "disable": None, **options}
        return factory(*args, **options) if before is None else before(factory, args, options)

    before = logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
