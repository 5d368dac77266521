"""Memory bandwidth of the same run, measured on a buffer that also clears the CPU's caches."""

from __future__ import annotations

import numpy as np
import torch

from cpu_ops.bandwidth import measure_gather_bandwidth, measure_read_bandwidth
from cpu_ops.worker_pool import WorkerPool
from offload.kv.store import KVStore
from offload.measuring.synthetic.one_slab import (
    PAGE_TOKENS,
    one_slab_store,
    page_bytes,
    slab_memory,
)
from offload.system.machine import last_level_cache_bytes

_MIN_BYTES = 32 * 2**20


class Yardstick:
    """A store of its own, in the same kind of memory, 1.5 times as large as the last level cache.

    Args:
        store: whose rows are imitated.
        tokens: how many of them each KV head gathers.
    """

    def __init__(self, store: KVStore, *, tokens: int) -> None:
        self._row_bytes = store.head_dim * store.dtype.itemsize
        of_page = page_bytes(store, store.dtype)
        pages = -(-max(_MIN_BYTES, last_level_cache_bytes() * 3 // 2) // of_page)
        self._store = one_slab_store(store, store.dtype, num_layers=1, pages=pages)
        seq = self._store.new_sequence()
        self._store.reserve([seq], [pages * PAGE_TOKENS])
        self._memory = slab_memory(self._store, seq, pages)
        self._memory.fill_(1)
        # Reading all of it leaves its end in the cache: gathers read its first third.
        self._num_rows = len(self._memory) // self._row_bytes // 3
        self._gathered = min(2 * store.num_kv_heads * tokens, self._num_rows // 2)
        self._random = np.random.default_rng(0)
        self._sequential: list[float] = []
        self._gather: list[float] = []

    def start(self, pool: WorkerPool) -> None:
        """Forget what was measured, and measure with `pool` from now on."""
        self._pool = pool
        self._sequential, self._gather = [], []

    def evict(self, *, record: bool) -> None:
        """Read everything once; leaves the workers spinning, as they are inside a decode step."""
        bandwidth = measure_read_bandwidth(self._pool, self._memory, repeats=1)
        if record:
            self._sequential.append(bandwidth)

    def gather(self) -> None:
        """Read rows at random sorted places."""
        rows = np.sort(self._random.choice(self._num_rows, self._gathered, replace=False))
        self.evict(record=True)
        self._gather.append(
            measure_gather_bandwidth(
                self._pool,
                self._memory,
                rows.astype(np.int32),
                row_bytes=self._row_bytes,
                repeats=1,
            )
        )

    @property
    def sequential_bandwidth(self) -> float:
        """Median bytes per second of the reads since `start`."""
        return float(np.median(self._sequential))

    @property
    def gather_bandwidth(self) -> float:
        """Median bytes per second of the gathers since `start`."""
        return float(np.median(self._gather))

    def close(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._store.close()
