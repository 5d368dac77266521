"""Kernels that are launched while the one before them still runs (programmatic dependent launch).

From compute capability 9.0 a kernel with `launch_pdl` may start when every program of the one
before has returned or called `await_inputs`, and waits there for all that the other has written.
What lies between two launches, a microsecond or more, is then hidden.

`await_inputs` is a program's first access to memory, so that the order is complete: whoever has
passed it knows that all kernels before the one before it are done, too, as that has passed its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from gpu_ops.launch import compiles, jit, tl


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def can_launch_early(x: Tensor) -> bool:
    """Whether kernels on `x` may be launched early: on Hopper and later, not by the interpreter."""
    return _capability(x.device) >= (9, 0) if x.is_cuda else compiles()


def early_option(early: bool) -> dict[str, Any]:
    """What a launch takes for it."""
    return {"launch_pdl": True} if early else {}


@jit
def await_inputs(EARLY: tl.constexpr) -> None:
    """Wait for the kernel before this one, and let the one after it start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
