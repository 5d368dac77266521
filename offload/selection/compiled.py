"""Numba's disk cache where it can be had: without one, or with damaged files, compile anew."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache, NullCache

_Function = TypeVar("_Function", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


_Base: Any = FunctionCache  # untyped, as numba is


class _Cache(_Base):  # type: ignore[misc]
    """What cannot be read or written, for whatever reason, is as if it were not there."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # unpickling cut bytes may raise anything
            logger.debug("the compiled %s cannot be read: %r", self._name, error)
            self._forget()
        if found is None:
            _say_compiling()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # saving reads the index first
            logger.debug("the compiled %s cannot be kept: %r", self._name, error)

    def _forget(self) -> None:
        try:
            self.flush()
        except OSError as error:
            logger.debug("the cache of %s cannot be emptied: %r", self._name, error)


def cache_of(function: Callable[..., Any]) -> Any:
    """Where machine code of `function` is kept; a cache that keeps nothing where no folder can be
    written, which a warning says once."""
    try:
        return _Cache(function)
    except (RuntimeError, OSError):
        _warn_slow()
        return NullCache()


@functools.cache
def _say_compiling() -> None:
    logger.info("compiling policies for this processor, once")


@functools.cache
def _warn_slow() -> None:
    logger.warning(
        "no folder can be written to keep compiled policies in: they are compiled at every start, "
        "which takes longer; name a folder in NUMBA_CACHE_DIR"
    )


def cached_njit(**options: Any) -> Callable[[_Function], _Function]:
    """As `numba.njit(cache=True, **options)`."""

    def compile_later(function: _Function) -> _Function:
        compiled: Any = numba.njit(**options)(function)
        compiled._cache = cache_of(function)
        return compiled  # type: ignore[no-any-return]

    return compile_later
