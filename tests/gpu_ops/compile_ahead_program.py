"""Compiles kernels ahead for an H100/H200 where there is no GPU; run by test_compile.py.

A program, as triton either interprets or compiles in a process.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from compile_kernels import Hopper
from triton.runtime import driver

from gpu_ops import compile_ahead, launch
from gpu_ops.merge_state import merge_state
from gpu_ops.silu_mul import activate, silu_mul

launched: list[str] = []
compiled: list[str] = []
progress: list[tuple[int, int]] = []


class Launching(Hopper):
    """A driver whose launches are noted."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, code, shared, device: (0, 0, 0, 0, 1024),
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: launched.append(metadata.name)


def call(size: int) -> None:
    gate = torch.zeros(4, size)
    activate(gate, gate)
    activate(gate, gate)
    silu_mul(torch.zeros(4, 2 * size), gate)
    out, lse = torch.zeros(2, 64), torch.zeros(2, 1)
    merge_state(out, lse, out, lse, out)


def count(*, fn: Any, **of_kernel: Any) -> None:
    compiled.append(fn.name)


def ahead() -> None:
    compile_ahead.compile_ahead(
        lambda: call(64),
        num_threads=2,
        on_progress=lambda done, total: progress.append((done, total)),
    )


driver.set_active(Launching())
compile_ahead._QUIET_SECONDS = 0.0
launch._on_cpu.set(True)  # what interpreted() does, but here triton compiles
triton.knobs.runtime.jit_post_compile_hook = count
ahead()
first = {"compiled": sorted(compiled), "launched": launched.copy(), "progress": progress.copy()}
compiled.clear()
call(64)
ahead()  # all there: no progress
print(json.dumps([first, {"compiled": compiled, "launched": launched, "progress": progress}]))
