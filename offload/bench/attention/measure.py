"""One layer's decode attention against the memory bandwidth of the same machine, in the same run.

Three kernels read a cache of random keys and values in the host KV store: `dense` reads all of it,
`sparse` a given selection (CSR, sorted random tokens per KV head), and `topk` scores every key,
selects, and attends. Two yardsticks read the very same memory: sequentially, and row by row at the
addresses that `sparse` visits. Everything is interleaved, so that a slow minute of a shared machine
slows all of it; figures are medians. Before a kernel is timed its output is compared with a float64
reference.

Every repeat reads another layer and another selection. The layers together are larger than the last
level cache, as those of a real model are: rows left in the cache by the repeat before would time
the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cpu_ops.attention import attend_csr_rows
from cpu_ops.bandwidth import measure_gather_bandwidth, measure_read_bandwidth
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.measuring.synthetic.attention_cache import AttentionCache
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.models.shape import MODEL_SHAPES, ModelShape
from offload.policies import ExactTopK, Full, Policy

KERNELS = ("dense", "sparse", "topk")
SHAPES = {
    **{name: MODEL_SHAPES[name] for name in ("llama-3.1-8b", "llama-3.2-1b")},
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, 32768, 1000000.0),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, 40960, 1000000.0),
    "smollm2-135m": MODEL_SHAPES["smollm2-135m"],
}


@dataclass(frozen=True)
class AttentionMeasurement:
    """One kernel on one number of threads.

    Attributes:
        tokens: attended per KV head.
        microseconds: median over the repeats; _p10 and _p90 are percentiles.
        bytes_read: keys and values that the kernel has to read.
        bandwidth: bytes_read per second of the median.
        yardstick: which bandwidth it is held against: "sequential read" or "row gather".
        yardstick_bandwidth: median bytes per second of that, measured between the same repeats.
        relative_error: L2, of the output against the float64 reference.
    """

    kernel: str
    num_threads: int
    kv_len: int
    tokens: int
    microseconds: float
    microseconds_p10: float
    microseconds_p90: float
    bytes_read: int
    bandwidth: float
    yardstick: str
    yardstick_bandwidth: float
    relative_error: float

    @property
    def yardstick_share(self) -> float:
        """Of the yardstick's bandwidth; 1.0 is as fast as memory."""
        return self.bandwidth / self.yardstick_bandwidth


def measure_attention(
    shape: ModelShape,
    *,
    kv_len: int,
    dtype: torch.dtype,
    threads: Sequence[int],
    kernels: Sequence[str] = KERNELS,
    sparse_tokens: int = 2048,
    topk_share: float = 0.02,
    repeats: int = 20,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[AttentionMeasurement]:
    """Measure `kernels` for one query token over a cache of `kv_len` tokens.

    Args:
        sparse_tokens: tokens per KV head that `sparse` attends to.
        topk_share: of kv_len, that `topk` selects.

    Raises:
        ValueError: an unknown kernel, or numbers out of range.
        HostBudgetError: a cache that does not fit.
        ArithmeticError: an output that differs from the reference.
    """
    unknown = sorted(set(kernels) - set(KERNELS))
    if unknown:
        raise ValueError(f"unknown kernel {unknown[0]!r}; available: {', '.join(KERNELS)}")
    if not 1 <= sparse_tokens <= kv_len and "sparse" in kernels:
        raise ValueError(f"sparse_tokens must be in [1, kv_len={kv_len}], got {sparse_tokens}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    measurements = []
    with closing(
        AttentionCache(shape, kv_len=kv_len, dtype=dtype, max_layers=shape.num_layers)
    ) as cache:
        query = cache.random_query(shape.num_qo_heads)
        exact = ExactAttention(
            cache.store,
            cache.seq,
            0,
            query[0],
            kv_len=kv_len,
            sm_scale=shape.head_dim**-0.5,
            dtype=torch.float64,
        )
        for i, num_threads in enumerate(threads):
            with closing(WorkerPool(num_threads)) as pool:
                rounds = _Rounds(cache, query, pool, _policies(kernels, kv_len, topk_share))
                rounds.check(exact, sparse_tokens)
                for round_index in range(repeats):
                    rounds.run(round_index, sparse_tokens)
                    on_progress(i * repeats + round_index + 1, len(threads) * repeats)
                measurements += rounds.measurements(sparse_tokens)
    return measurements


def _policies(kernels: Sequence[str], kv_len: int, topk_share: float) -> dict[str, Policy]:
    policies: dict[str, Policy] = {kernel: Full() for kernel in kernels}
    if "topk" in policies:
        topk = ExactTopK(budget_tokens=max(128, round(topk_share * kv_len)), dense_layers=0)
        if topk.budget_tokens >= kv_len:
            raise ValueError(f"kv_len={kv_len} is too short to select {topk.budget_tokens} tokens")
        policies["topk"] = topk
    return policies


class _Rounds:
    """Runs every kernel and yardstick once per round, and keeps the times."""

    def __init__(
        self,
        cache: AttentionCache,
        query: torch.Tensor,
        pool: WorkerPool,
        policies: dict[str, Policy],
    ) -> None:
        self._cache = cache
        self._query = query
        self._out = torch.empty_like(query)
        self._pool = pool
        self._policies = policies
        num_qo_heads = query.shape[1] // cache.store.head_dim
        self._attention = {
            kernel: DecodeAttention(policy, cache.store, num_qo_heads=num_qo_heads, pool=pool)
            for kernel, policy in policies.items()
        }
        self._step = {
            kernel: attention.begin_step([cache.seq], [cache.kv_len])
            for kernel, attention in self._attention.items()
        }
        self._seconds: dict[str, list[float]] = {kernel: [] for kernel in policies}
        self._bandwidths: dict[str, list[float]] = {"sequential read": [], "row gather": []}
        self._errors: dict[str, float] = {}

    def check(self, exact: ExactAttention, sparse_tokens: int) -> None:
        """Compare each kernel's output for layer 0 with the reference; also warms them up."""
        indices = self._cache.random_selection(sparse_tokens, seed=0)
        for kernel, policy in self._policies.items():
            self._out.fill_(float("nan"))
            self._attend(kernel, 0, indices)
            selection: list[list[int]] = [[] for _ in indices]
            if kernel == "sparse":
                selection = indices.tolist()
            elif isinstance(policy, ExactTopK):
                selection = self._attention[kernel].last_selection()
                exact.check_topk(
                    selection,
                    budget_tokens=policy.budget_tokens,
                    sink_tokens=policy.sink_tokens,
                    recent_tokens=policy.recent_tokens,
                )
            self._errors[kernel] = exact.check_output(self._out[0], selection)

    def run(self, round_index: int, sparse_tokens: int) -> None:
        """One round; its index chooses the layers and the selections."""
        cache, pool = self._cache, self._pool
        slots = len(self._policies) + 1
        self._wake()
        read = measure_read_bandwidth(pool, cache.memory, repeats=1)
        self._bandwidths["sequential read"].append(read)
        if "sparse" in self._policies:
            layer_idx = round_index * slots % cache.num_layers
            indices = cache.random_selection(sparse_tokens, seed=2 * round_index + 1)
            rows = cache.row_numbers(layer_idx, indices)
            self._wake()
            gather = measure_gather_bandwidth(
                pool, cache.memory, rows, row_bytes=cache.row_bytes, repeats=1
            )
            self._bandwidths["row gather"].append(gather)
        # Not the rows, nor if there are several the layer, that have just been read.
        indices = cache.random_selection(sparse_tokens, seed=2 * round_index + 2)
        for slot, kernel in enumerate(self._policies, start=1):
            layer_idx = (round_index * slots + slot) % cache.num_layers
            self._wake()
            start = time.perf_counter()
            self._attend(kernel, layer_idx, indices)
            self._seconds[kernel].append(time.perf_counter() - start)

    def measurements(self, sparse_tokens: int) -> list[AttentionMeasurement]:
        """What the rounds so far gave."""
        cache, measurements = self._cache, []
        for kernel, policy in self._policies.items():
            keys = values = sparse_tokens if kernel == "sparse" else cache.kv_len
            if isinstance(policy, ExactTopK):
                values = policy.budget_tokens
            yardstick = "row gather" if kernel == "sparse" else "sequential read"
            bytes_read = cache.store.num_kv_heads * (keys + values) * cache.row_bytes
            seconds = np.percentile(self._seconds[kernel], [10, 50, 90])
            p10, median, p90 = (float(t) for t in seconds)
            measurements.append(
                AttentionMeasurement(
                    kernel=kernel,
                    num_threads=self._pool.num_threads,
                    kv_len=cache.kv_len,
                    tokens=values,
                    microseconds=median * 1e6,
                    microseconds_p10=p10 * 1e6,
                    microseconds_p90=p90 * 1e6,
                    bytes_read=bytes_read,
                    bandwidth=bytes_read / median,
                    yardstick=yardstick,
                    yardstick_bandwidth=float(np.median(self._bandwidths[yardstick])),
                    relative_error=self._errors[kernel],
                )
            )
        return measurements

    def _attend(self, kernel: str, layer_idx: int, indices: npt.NDArray[np.int32]) -> None:
        attention, step = self._attention[kernel], self._step[kernel]
        if kernel == "sparse":
            attend_csr_rows(attention, layer_idx, step, self._query, self._out, indices)
        else:
            attention.attend(layer_idx, step, self._query, self._out)

    def _wake(self) -> None:
        """Have the workers spinning, as they are inside a decode step."""
        measure_read_bandwidth(self._pool, self._query, repeats=2)
