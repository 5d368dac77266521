"""Keeping the caller's `torch.autocast` out of what is computed in the model's own dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
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
