"""Compiles and runs the standalone C++ test programs of this folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CPP = HERE.parents[1] / "cpp"
BUILT = HERE.parents[1] / "build" / "test-programs"
FLAGS = ["-std=c++20", "-g1", "-fno-math-errno", "-fno-omit-frame-pointer", "-pthread"]
FLAGS += [f"-I{CPP}", f"-I{HERE}"]
# Of sanitizers, most of the time is the compiler's: what takes little of it at run time, the tables
# of wide instructions beside the scalar one that each is compared with, is not optimised.
OPTIMISED, PLAIN = "-O1", "-O0"
ALL_ISAS = ["scalar", "neon", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]


def run(command: Sequence[str | Path], timeout_s: int = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def require_sanitizer(folder: Path, compiler: str, flags: Sequence[str]) -> None:
    """Skip unless `compiler` links programs with these flags (a sanitizer needs its runtime)."""
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    if run([compiler, *flags, source, "-o", folder / "probe"]).returncode != 0:
        pytest.skip(f"{compiler} cannot link with {' '.join(flags)}")


def object_folder(compiler: str, flags: Sequence[str]) -> Path:
    """Where objects of these flags stay until a source changes; those of older sources are gone."""
    paths = (path for root in (CPP, HERE) for path in root.rglob("*") if path.suffix != ".pyc")
    sources = sha256(run([compiler, "--version"]).stdout.encode())
    for path in sorted(path for path in paths if path.is_file()):
        sources.update(str(path).encode() + path.read_bytes())
    command = sha256(" ".join([compiler, *flags]).encode()).hexdigest()[:8]
    folder = BUILT / f"{command}-{sources.hexdigest()[:16]}"
    for older in BUILT.glob(f"{command}-*"):
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_program(
    source: str,
    *,
    kernels: Sequence[str],
    units: Sequence[str],
    flags: Sequence[str] = (),
    compiler: str = "g++",
) -> Path:
    """Build tests/cpp/`source` with `kernels` of cpp/kernels/isa and other `units` of cpp.

    Objects are shared by programs of the same flags, and by runs of the tests. What is not a kernel
    is one file to the compiler, which takes as long for the standard headers of each as for what is
    in it.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    folder = object_folder(compiler, flags)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes do not compile the same
        require_sanitizer(folder, compiler, flags)
        main = folder / source
        files = [*(next(CPP.glob(f"*/{unit}.cpp")) for unit in units), HERE / source]
        main.write_text("".join(f'#include "{path}"\n' for path in files))
        sources = [main, *(CPP / f"kernels/isa/{isa}.cpp" for isa in kernels)]

        def compile_one(path: Path) -> Path:
            target, part = folder / f"{path.stem}.o", folder / f"{path.stem}.part"
            level = OPTIMISED if path in (main, CPP / "kernels/isa/scalar.cpp") else PLAIN
            if not target.exists():
                command = [compiler, *FLAGS, level, *flags, "-c", path, "-o", part]
                result = run(command, timeout_s=300)
                assert result.returncode == 0, result.stderr
                part.replace(target)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        program = main.with_suffix("")
        result = run([compiler, *FLAGS, *flags, *objects, "-o", program])
        assert result.returncode == 0, result.stderr
    return program
