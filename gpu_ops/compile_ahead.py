"""Compiling kernels before anything waits for them: all together, on several CPUs.

Triton compiles a kernel, for 0.3 s and more, where it is launched first, and on a machine that has
not seen it before it calls a C compiler for its launcher, too.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed, wait
from typing import Any

import torch

from gpu_ops.launch import compiled_ahead, triton

_QUIET_SECONDS = 0.5  # kernels from triton's cache take milliseconds each


def compile_ahead(
    launches: Callable[[], None], *, num_threads: int, on_progress: Callable[[int, int], None]
) -> None:
    """Compile all kernels that `launches` launches on the current device, or load them from
    triton's cache.

    None of them runs meanwhile: what is to be in their outputs is not. What else `launches` does
    with torch is done. A kernel that cannot be compiled raises where it is launched for real.

    Args:
        num_threads: that compile.
        on_progress: gets how many kernels are ready, and of how many; not if all are at once.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # an older triton, or none
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    pool = ThreadPoolExecutor(
        num_threads, initializer=lambda: None if device is None else torch.cuda.set_device(device)
    )
    try:
        # In a context of its own: nothing of these modes stays, whatever is raised.
        contextvars.copy_context().run(_compile, launches, pool, on_progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(
    launches: Callable[[], None], pool: Executor, on_progress: Callable[[int, int], None]
) -> None:
    mode = _mode()(pool)
    mode.__enter__()
    compiled_ahead.set(_take)
    launches()
    _, pending = wait(mode.raw_futures, timeout=_QUIET_SECONDS)
    total = len(mode.raw_futures)
    if pending:
        on_progress(total - len(pending), total)
    for number, _ in enumerate(as_completed(pending), total - len(pending) + 1):
        on_progress(number, total)
    for kernel in mode.future_kernels.values():
        kernel.result(ignore_errors=True)


def _take(kernel: Any) -> None:
    """Put what is compiled where the next launch finds it."""
    if hasattr(kernel, "future") and kernel.future.done():
        kernel.result(ignore_errors=True)


def _mode() -> Any:
    class LoadedToo(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: Any, compile_fn: Any, *more: Any) -> Any:  # newer ones clean up, too
            def compile_and_load() -> Any:
                kernel = compile_fn()
                kernel.run  # noqa: B018 - makes the launcher and puts the code on the device
                return kernel

            return super().submit(key, compile_and_load, *more)

    return LoadedToo
