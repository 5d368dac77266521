"""Runs the tests once per ISA of `OFFLOAD_ISA`, and ends with a line for each.

    ISAS="avx2 scalar" python tests/every_isa.py [arguments of pytest]

Without ISAS all that there are: those that this CPU lacks are named and left out. torch, oneDNN,
MKL, NumPy and Numba are held to the same instructions as our kernels, so that a run is close to one
on a CPU that has no more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from cpu_ops import native

_core = np._core if hasattr(np, "_core") else np.core
NUMPY_DISPATCH = list(_core._multiarray_umath.__cpu_dispatch__)
BEYOND_AVX2 = [name for name in NUMPY_DISPATCH if "512" in name or name == "X86_V4"]


def libraries(one_dnn: str, numba: str, mkl: str = "", aten: str = "") -> dict[str, str]:
    """Numba's features are those of the CPU that it is told, not of this one."""
    chosen = {"MKL_ENABLE_INSTRUCTIONS": mkl, "ATEN_CPU_CAPABILITY": aten}
    chosen = {name: value for name, value in chosen.items() if value}
    return {
        **chosen,
        "ONEDNN_MAX_CPU_ISA": one_dnn,
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": "",
    }


LIBRARIES = {
    "scalar": libraries("SSE41", "nehalem", "SSE4_2", "default")
    | {"NPY_DISABLE_CPU_FEATURES": " ".join(NUMPY_DISPATCH)},
    "avx2": libraries("AVX2", "haswell", "AVX2", "avx2")
    | {"NPY_DISABLE_CPU_FEATURES": " ".join(BEYOND_AVX2)},
    "avx512": libraries("AVX512_CORE", "skylake-avx512"),
    "avx512_vnni": libraries("AVX512_CORE_VNNI", "cascadelake"),
    "avx512_bf16": libraries("AVX512_CORE_BF16", "cooperlake"),
}


def chosen_isas() -> list[str]:
    known = native.known_isas()
    chosen = os.environ.get("ISAS", "").split() or known
    for isa in chosen:
        if isa not in known:
            raise SystemExit(f"unknown ISA '{isa}' in ISAS; known: {', '.join(known)}")
    return chosen


def run(isa: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Its status and pytest's last line, of a run whose output is also shown."""
    command = [sys.executable, "-m", "pytest", "-rs", *arguments]
    environment = {**os.environ, **LIBRARIES.get(isa, {}), "OFFLOAD_ISA": isa}
    last = "no output"
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return process.returncode, last


def main(arguments: Sequence[str]) -> int:
    lines, failed = [], False
    for isa in chosen_isas():
        if isa not in native.available_isas():
            lines.append(f"{isa:<12} left out: this CPU or build lacks it")
            continue
        print(f"\n{isa}: {' '.join(f'{k}={v!r}' for k, v in LIBRARIES.get(isa, {}).items())}")
        status, last = run(isa, arguments)
        failed |= status != 0
        lines.append(f"{isa:<12} {'failed' if status else 'passed'}: {last}")
    print("", *lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
