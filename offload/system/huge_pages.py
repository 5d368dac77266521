"""Fresh host memory on huge pages."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.system.map_in_threads import map_in_threads
from offload.system.memory import available_cpus

_FEW_PAGES_BYTES = 4 * 2**20
_TOUCH_CHUNK_BYTES = 64 * 2**20  # a multiple of the page sizes, 4 KiB to 2 MiB


def map_slab(num_bytes: int, *, resident: bool = True) -> torch.Tensor:
    """uint8 [num_bytes] of fresh, zeroed memory that is unmapped with the tensor.

    Args:
        resident: from the start; False: each page when it is written.

    Raises:
        OSError: if the system refuses the mapping.
    """
    memory = _map(num_bytes)
    if resident:
        touch(memory)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As NumPy's, on huge pages where that is more than a few of them; resident when written."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _FEW_PAGES_BYTES:
        return np.zeros(shape, dtype)
    return np.frombuffer(_map(num_bytes), dtype).reshape(shape)


def _map(num_bytes: int) -> mmap.mmap:
    # Private, or the pages would be shared memory: no huge pages, and charged as a file.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: mmap.mmap) -> None:
    """Make every page of `memory` resident, on all CPUs: the kernel has to zero it."""

    def touch_chunk(chunk: npt.NDArray[np.uint8]) -> None:
        chunk[:: mmap.PAGESIZE] = 0  # NumPy lets go of the GIL

    every_byte = np.frombuffer(memory, np.uint8)
    chunks = [
        every_byte[i : i + _TOUCH_CHUNK_BYTES] for i in range(0, len(memory), _TOUCH_CHUNK_BYTES)
    ]
    if len(chunks) == 1:
        return touch_chunk(chunks[0])
    map_in_threads(touch_chunk, chunks, available_cpus())
