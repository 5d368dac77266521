"""The NEON kernels, cross-compiled and run under qemu-user where this is not an Arm machine."""

from __future__ import annotations

import platform
import shutil

import pytest
from programs import ALL_ISAS, compile_program, run

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"


@pytest.mark.skipif(platform.machine() == "aarch64", reason="tests/cpu_ops runs NEON natively here")
def test_neon_agrees_with_scalar():
    """Debian: apt-get install g++-aarch64-linux-gnu qemu-user."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed")
    program = compile_program(
        "kernel_parity.cpp",
        kernels=ALL_ISAS,
        units=["dispatch", "top_k"],
        flags=["-static", "-O2"],
        compiler=COMPILER,
    )
    result = run([EMULATOR, program, "neon"], timeout_s=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "neon: ok\n"
