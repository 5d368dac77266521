"""Errors of budgets and devices that users meet in many places."""

from __future__ import annotations


class NoGPUError(RuntimeError):
    """A GPU was asked for, and torch finds none that it can use."""


class _OutOfMemoryError(MemoryError, RuntimeError):
    """A MemoryError for people, and for who then tries a smaller batch what torch would raise.

    accelerate's `should_reduce_batch_size`, and so lm-eval, wants a RuntimeError whose one argument
    has torch's words. The text that is shown is without them: it says what to change.
    """

    _WORDS = ": out of memory."

    def __init__(self, message: str) -> None:
        super().__init__(message.removesuffix(self._WORDS) + self._WORDS)

    def __str__(self) -> str:
        return str(self.args[0]).removesuffix(self._WORDS)


class DeviceMemoryError(_OutOfMemoryError):
    """The memory of a device does not suffice; the message names the sizes and the option."""


class HostBudgetError(_OutOfMemoryError):
    """The host KV store would grow beyond its budget, or beyond the memory that is left."""


class SessionMiss(ValueError):
    """A saved session cannot be taken up; the message says why. Nothing has changed."""
