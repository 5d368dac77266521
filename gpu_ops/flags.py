"""Flags in mapped host memory, through which a kernel and the CPU wait for each other.

A flag is an int32, 0 or 1. The kernel that writes what the CPU reads raises one flag itself, and
the kernel that reads what the CPU writes waits for another: memory operations of a stream would do
the same, but are nodes of the graph like a kernel, and three of them cost 14 us of every layer.

Many programs take part in one flag: the last to arrive, by a counter in GPU memory that it sets
back to 0, raises or lowers it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_reachable, check_tensor
from gpu_ops.launch import globaltimer, is_interpreted, jit, pointer, runs_kernel, tl


@jit
def acquire(flag: tl.tensor, INTERPRETED: tl.constexpr) -> None:
    """Wait until `flag` is up: what its raiser wrote before can then be read."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred down;
            look:
                ld.acquire.sys.global.s32 $0, [$1];
                setp.eq.s32 down, $0, 0;
                @down bra look;
            }
            """,
            "=r,l,~{memory}",
            [flag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def release(flag: tl.tensor, INTERPRETED: tl.constexpr) -> None:
    """Raise `flag` after everything that this thread has written or seen written."""
    if INTERPRETED:
        tl.store(flag, 1)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.s32 [$1], 1; mov.b32 $0, 0;",
            "=r,l,~{memory}",
            [flag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def raise_last(
    flag: tl.tensor, counter: tl.tensor, num_programs: tl.tensor, INTERPRETED: tl.constexpr
) -> None:
    """Raise `flag` after everything that all programs have written."""
    if arrives_last(counter, num_programs):
        release(flag, INTERPRETED)


@jit
def lower_last(flag: tl.tensor, counter: tl.tensor, num_programs: tl.tensor) -> None:
    """Lower `flag` after all programs have seen it."""
    if arrives_last(counter, num_programs):
        tl.store(flag, 0)


@jit
def arrives_last(counter: tl.tensor, num_programs: tl.tensor) -> tl.tensor:
    """Whether all other programs were here before; what they wrote until then is visible."""
    tl.debug_barrier()  # of this program, all threads' writes come before the count
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@jit
def mark_time(times: tl.tensor, program: tl.tensor) -> None:
    """Program 0 writes the GPU's clock, in ns."""
    if program == 0:
        tl.store(times, globaltimer())


@jit
def raise_flag_kernel(flag: tl.tensor, INTERPRETED: tl.constexpr) -> None:
    """One program."""
    release(flag, INTERPRETED)


def raise_flag(flag: Tensor, like: Tensor) -> None:
    """Raise `flag` after everything that was launched before.

    Args:
        flag: int32, in pinned host memory.
        like: a tensor of the device that does it.
    """
    check_flag(flag, like.device)
    if not runs_kernel(like):
        flag[0] = 1
        return
    raise_flag_kernel[(1,)](pointer(flag), is_interpreted(), num_warps=1)


def check_flag_and_counter(
    flag: Tensor | None, counter: Tensor | None, device: torch.device
) -> None:
    """ValueError unless both are there and the CPU and `device` reach the flag, or neither is."""
    if (flag is None) != (counter is None):
        raise ValueError("flag and counter must be given together")
    if flag is not None and counter is not None:
        check_flag(flag, device)
        check_tensor("counter", counter, (1,), torch.int32, device)


def check_flag(flag: Tensor, device: torch.device) -> None:
    """ValueError unless `flag` is an int32 that `device` and the CPU reach."""
    check_reachable("flag", flag, (1,), torch.int32, device)
