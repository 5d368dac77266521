"""Moving what a policy builds on a device to the host, and back, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORKSPACE_BYTES = 128 * 2**20  # what one step of a build may take of the device for a moment


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, complete when the current stream has come here.

    In pinned memory, which torch keeps and rounds up: what lives longer should be copied again.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x.contiguous(), non_blocking=True)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, in the order of the current stream."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
