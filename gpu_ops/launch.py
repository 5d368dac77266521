"""Which code an operator runs: its Triton kernel or its torch reference.

- CUDA tensors: the kernel.
- CPU tensors: the reference, so that the whole decode step runs, and is tested, without a GPU.
- CPU tensors inside `interpreted()`: the kernel, run by Triton's interpreter. It is a thousand
  times slower than the reference and is there to test kernels where there is no GPU.

The choice is explicit, because Triton's own would not do: TRITON_INTERPRET=1 counts only if it is
set when triton is first imported, and then for the whole process, of which most wants references.
So `interpreted()` needs the variable (tests/conftest.py sets it where there is no GPU), but the
variable alone changes nothing for CPU tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    has_triton = True
except ModuleNotFoundError as error:
    if error.name != "triton":  # a broken installation must not pass for a missing one
        raise
    triton = tl = None
    has_triton = False

__all__ = [
    "compiled_ahead",
    "compiles",
    "gl",
    "gluon_jit",
    "has_gluon",
    "has_triton",
    "interpreted",
    "interprets",
    "jit",
    "jit_for_any",
    "next_power_of_2",
    "pointer",
    "runs_kernel",
    "tl",
    "triton",
]

# Fixed by now: triton's own device functions (tl.sum, …) are either compiled or interpreted.
_interprets = has_triton and bool(triton.knobs.runtime.interpret)

# Triton's language with layouts, of which its interpreter has nothing.
gl: Any = None
gluon: Any = None
if has_triton and not _interprets:
    with contextlib.suppress(ImportError):  # an older triton
        gluon = importlib.import_module("triton.experimental.gluon")
        gl = importlib.import_module("triton.experimental.gluon.language")
has_gluon = gl is not None
_on_cpu: ContextVar[bool] = ContextVar("kernels run on CPU tensors", default=False)

# While there is one kernels are compiled instead of launched, and it gets what triton made of each
# launch (`compile_ahead`).
compiled_ahead: ContextVar[Callable[[Any], Any] | None] = ContextVar(
    "takes kernels that are not launched", default=None
)

# Numbers, and what a thread reads and writes one element of: that these are multiples of 16 gains
# nothing, and depends on the batch, on a step's part of it, or on how long contexts are.
_ANY_ALIGNMENT = (
    "positions",
    "counts",
    "host_counts",
    "hot_counts",
    "rest_counts",
    "log_counts",
    "addresses",
    "page_table",
    "host_pages",
    "partial_lse",
    "num_rows",
    "num_lists",
    "max_pages",
    "max_host_pages",
)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function as it is where triton is not installed."""
    return jit_for_any()(function)


def jit_for_any(*sizes: str) -> Callable[[Callable[..., None]], Any]:
    """`jit` that does not compile again for multiples of 16, and 1, of these arguments.

    For sizes that depend on a prompt, which should not wait for the compiler in the middle.
    """
    if not has_triton:
        return lambda function: function

    def decorate(function: Callable[..., Any]) -> Any:
        names = [name for name in _ANY_ALIGNMENT if name in inspect.signature(function).parameters]
        return _launched_or_ahead(
            triton.jit(
                function, do_not_specialize=list(sizes), do_not_specialize_on_alignment=names
            )
        )

    return decorate


def gluon_jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, or the function as it is where there is no Gluon."""
    return _launched_or_ahead(gluon.jit(function)) if has_gluon else function


def _launched_or_ahead(kernel: Any) -> Any:
    """The kernel, which is compiled instead of launched while something is `compiled_ahead`."""

    def run(*args: Any, warmup: bool, **options: Any) -> Any:
        ahead = compiled_ahead.get()
        launched = type(kernel).run(kernel, *args, warmup=warmup or ahead is not None, **options)
        return launched if ahead is None else ahead(launched)

    kernel.run = run
    return kernel


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, which has no instructions of a GPU."""
    return _interprets


def compiles() -> bool:
    """Whether kernels on CPU tensors are compiled (but not run) instead of interpreted."""
    return has_triton and not _interprets


def runs_kernel(x: Tensor) -> bool:
    """Whether an operator on `x` runs its kernel.

    Raises:
        RuntimeError: for a CUDA tensor without triton.
    """
    if not x.is_cuda:
        return _on_cpu.get()
    if not has_triton:
        raise RuntimeError(
            "operators on CUDA tensors need triton, which is not installed: pip install triton"
        )
    return True


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels instead of references on CPU tensors, by Triton's interpreter.

    Raises:
        RuntimeError: if triton is missing or was imported without TRITON_INTERPRET=1.
    """
    if not _interprets:
        state = "was imported without it" if has_triton else "is not installed"
        raise RuntimeError(f"interpreted() needs triton and TRITON_INTERPRET=1, but triton {state}")
    token = _on_cpu.set(True)
    try:
        yield
    finally:
        _on_cpu.reset(token)


def pointer(x: Tensor | None) -> Any:
    """`x` as a kernel argument, also if it is host memory that the GPU reaches (pinned); or None.

    Triton refuses CPU tensors, but takes whatever has an address and a dtype. The address of pinned
    and of registered memory is the same on the GPU (unified addressing).
    """
    return x if x is None or x.is_cuda or _interprets else _HostPointer(x)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1): the size of a Triton block."""
    return 1 << (n - 1).bit_length()


class _HostPointer:
    def __init__(self, x: Tensor) -> None:
        self.dtype: torch.dtype = x.dtype
        self._address = x.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
