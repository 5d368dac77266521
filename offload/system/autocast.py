"""Keeping what a caller set in torch out of what is computed here: `torch.autocast`, the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Around work on the host and on `device`.

    Autocast changes torch's matrix products only; our kernels between them take one dtype.
    """
    stack = ExitStack()
    for kind in {"cpu", device.type}:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on torch's current device, whichever their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
