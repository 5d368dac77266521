"""The threads that all native operators share."""

from __future__ import annotations

from cpu_ops import _native

MAX_THREADS = 2**16  # more than any machine runs at a time


class WorkerPool:
    """Threads that run kernels; the calling thread is one of them.

    Args:
        num_threads: workers including the caller.
        spin_us: how long idle workers spin before they sleep.
    """

    def __init__(self, num_threads: int, spin_us: int = 500) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if num_threads > MAX_THREADS:
            raise ValueError(f"num_threads must be at most {MAX_THREADS}, got {num_threads}")
        if spin_us < 0:
            raise ValueError(f"spin_us must not be negative, got {spin_us}")
        self.native = _native.WorkerPool(num_threads, spin_us)

    @property
    def num_threads(self) -> int:
        return self.native.num_threads

    def close(self) -> None:
        """End the threads. Later calls run on the caller alone."""
        self.native.close()
