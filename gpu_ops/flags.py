"""Flags in mapped host memory, by which the GPU and the CPU wait for each other.

A flag is an int32, 0 or 1. One thread of one program does it: on an H200 every further warp that
looks at the same flag costs the others 1 us, as the reads of one line of host memory follow each
other. Memory operations of the stream (cuStreamWaitValue32) can do the same, and are slower: a
round trip with data of 16 KB takes 10.6 us by them and 8.4 us by kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_reachable
from gpu_ops.launch import jit, pointer, tl


@jit
def raise_flag_kernel(flag: tl.tensor) -> None:
    """One program of one warp."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.s32 [$1], 1;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,~{memory}",
        [flag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def await_flag_kernel(flag: tl.tensor) -> None:
    """One program of one warp."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred other, down;
            .reg .u32 thread;
            .reg .s32 value;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra done;
        look:
            ld.acquire.sys.global.s32 value, [$1];
            setp.eq.s32 down, value, 0;
            @down bra look;
            st.relaxed.sys.global.s32 [$1], 0;
        done:
            mov.b32 $0, 0;
        }
        """,
        "=r,l,~{memory}",
        [flag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def raise_flag(flag: Tensor, device: torch.device) -> None:
    """Raise `flag` after everything that was launched on the current stream before.

    Args:
        flag: int32 [1], in pinned host memory.
        device: whose stream.
    """
    check_reachable("flag", flag, (1,), torch.int32, device)
    raise_flag_kernel[(1,)](pointer(flag), num_warps=1)


def await_flag(flag: Tensor, device: torch.device) -> None:
    """Let what is launched on the current stream from now on wait until `flag` is up; lower it.

    What its raiser wrote before can then be read.

    Args:
        flag, device: as for `raise_flag`.
    """
    check_reachable("flag", flag, (1,), torch.int32, device)
    await_flag_kernel[(1,)](pointer(flag), num_warps=1)


_FLAG_CAPABILITY = (7, 0)  # loads that acquire and stores that release


def why_no_flags(device: torch.device) -> str | None:
    """None if kernels of `device` can wait for the CPU, and the CPU for them."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLAG_CAPABILITY:
        return (
            f"this GPU has compute capability {capability[0]}.{capability[1]}, and flags between "
            f"GPU and CPU need {_FLAG_CAPABILITY[0]}.{_FLAG_CAPABILITY[1]}"
        )
    return None
