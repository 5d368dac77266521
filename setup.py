"""Builds cpu_ops._native, the torch-free C++ extension. All else is in pyproject.toml."""

import os
from glob import glob
from hashlib import sha256
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# No -march: every ISA opens its own target region; cpp/kernels/dispatch.cpp chooses at run time.
# GCC's own AVX-512 headers trip both uninitialized warnings.
compile_args = [
    "-O3",
    "-g1",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]

folder = Path("cpp/bindings")
bindings = sorted([*folder.glob("[a-z]*.cpp"), *folder.glob("[a-z]*.h")])
digest = sha256(b"".join(source.read_bytes() for source in bindings)).hexdigest()

included = glob("cpp/bindings/bindings_*.cpp")  # by bindings.cpp

native = Pybind11Extension(
    "cpu_ops._native",
    sources=sorted(set(glob("cpp/**/*.cpp", recursive=True)) - set(included)),
    depends=sorted([*glob("cpp/**/*.h", recursive=True), *included]),
    include_dirs=["cpp"],
    cxx_std=20,
    define_macros=[("BINDINGS_DIGEST", f'"{digest}"')],  # cpu_ops/__init__.py compares it
    extra_compile_args=compile_args + os.environ.get("OFFLOAD_CXXFLAGS", "").split(),
    extra_link_args=["-pthread"],
)

# `make wheel` empties this folder, and builds for one Python after another: the bindings alone
# include its headers.
objects = os.environ.get("OFFLOAD_OBJECTS")


def must_compile(compiled: str, source: str) -> bool:
    return objects is None or Path(source).parent == folder or not os.path.exists(compiled)


ParallelCompile(
    "OFFLOAD_BUILD_JOBS", default=os.cpu_count() or 1, needs_recompile=must_compile
).install()
# The Makefile compiles the extension while it installs the rest.
setup(
    ext_modules=[] if os.environ.get("OFFLOAD_NO_EXTENSION") else [native],
    options={"build": {"build_temp": objects}} if objects else {},
)
