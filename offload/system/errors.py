"""Errors of budgets and devices that users meet in many places."""

from __future__ import annotations


class NoGPUError(RuntimeError):
    """A GPU was asked for, and torch finds none that it can use."""


class DeviceMemoryError(MemoryError):
    """The memory of a device does not suffice; the message names the sizes and the option."""


class HostBudgetError(MemoryError):
    """The host KV store would grow beyond its budget, or beyond the memory that is left."""
