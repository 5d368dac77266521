"""How fast this machine reads its memory: in sequence, and row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import isa_name
from cpu_ops.worker_pool import WorkerPool


def measure_read_bandwidth(
    pool: WorkerPool, buffer: Tensor, *, repeats: int = 5, isa: str | None = None
) -> float:
    """Median bytes per second of reading `buffer` once, in order, on all threads of the pool."""
    num_bytes = buffer.numel() * buffer.element_size()
    times = [
        _native.time_sequential_read(pool.native, isa or isa_name(), buffer.data_ptr(), num_bytes)
        for _ in range(repeats)
    ]
    return num_bytes / float(np.median(times))


def measure_gather_bandwidth(
    pool: WorkerPool,
    buffer: Tensor,
    rows: npt.NDArray[np.int32],
    *,
    row_bytes: int = 256,
    repeats: int = 5,
    isa: str | None = None,
) -> float:
    """Median bytes per second of reading the given rows of `buffer`, in order, on all threads."""
    num_bytes = buffer.numel() * buffer.element_size()
    if len(rows) == 0 or int(rows.max()) >= num_bytes // row_bytes or int(rows.min()) < 0:
        raise ValueError(f"rows must lie in [0, {num_bytes // row_bytes}) and not be empty")
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    times = [
        _native.time_row_gather(pool.native, isa or isa_name(), buffer.data_ptr(), rows, row_bytes)
        for _ in range(repeats)
    ]
    return len(rows) * row_bytes / float(np.median(times))
