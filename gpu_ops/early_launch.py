"""Kernels that are launched while the one before them still runs (programmatic dependent launch).

From compute capability 9.0 a kernel with `launch_pdl` may start when every program of the one
before has returned or called `await_inputs`, and waits there for all that the other has written.
What lies between two launches, a microsecond or more, is then hidden.

`await_inputs` is a program's first access to memory, so that the order is complete: whoever has
passed it knows that all kernels before the one before it are done, too, as that has passed its own.
Only `prefetch` may precede it, which moves lines into the L2 and reads nothing.
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


@jit
def prefetch(
    x: tl.tensor,  # pointer; None: nothing
    num_bytes: tl.tensor,
    program: tl.tensor,
    num_programs: tl.tensor,
    LINES: tl.constexpr,  # that each program has at most; what lies beyond is left out
    PREFETCHES: tl.constexpr,
) -> None:
    """Bring memory into the L2 which many programs will read in a chain of loads, each a line."""
    if PREFETCHES and x is not None:
        offset = (program + num_programs * tl.arange(0, LINES)).to(tl.int64) * 128
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [x.to(tl.int64) + offset, (offset < num_bytes).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
