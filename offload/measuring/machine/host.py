"""Measures what the host does in a decode step: reading memory, and attending to selected rows."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cpu_ops.attention import attend_csr_rows
from cpu_ops.bandwidth import measure_read_bandwidth
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.measuring.machine.spread import Spread
from offload.measuring.synthetic.attention_cache import AttentionCache
from offload.planning.cost_table import CostTable
from offload.planning.profile import OnProgress, typical_profile
from offload.policies import ExactTopK, Full, Policy, TidalDecode
from offload.system.memory import host_memory_limit_bytes

if TYPE_CHECKING:
    from offload.models.shape import ModelShape

_KV_LEN = 16384
_TOKENS = (32, 256, 1024, 2048, 4096)  # selected per KV head
_REPEATS = 9
_MAX_CACHE_BYTES = 4 * 2**30
_SCAN_SHARES = (8, 2, 1)  # of _KV_LEN
NUM_PARTS = 4 + len(_TOKENS)


def measure_host(
    num_threads: int,
    shape: ModelShape,
    dtype: torch.dtype,
    on_progress: OnProgress = lambda what, done, total: None,
    spread: Spread | None = None,
) -> dict[str, Any]:
    """The host's fields of a `MachineProfile`; `spread` takes in how far long timings spread.

    Every repeat attends to another layer of a cache of random keys that is larger than the
    processor's caches, then at once to the same rows again: cold, and warm. Figures are medians.
    """
    layer_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize * _KV_LEN
    most_bytes = min(_MAX_CACHE_BYTES, host_memory_limit_bytes() // 4)
    max_layers = max(2, most_bytes // layer_bytes)
    cache = AttentionCache(shape, kv_len=_KV_LEN, dtype=dtype, max_layers=max_layers)
    with closing(cache), closing(WorkerPool(num_threads)) as pool:
        on_progress("host memory", 1, NUM_PARTS)
        bandwidth = measure_read_bandwidth(pool, cache.memory)
        attention = DecodeAttention(Full(), cache.store, num_qo_heads=shape.num_qo_heads, pool=pool)
        cold, warm = [], []
        for i, tokens in enumerate(_TOKENS):
            on_progress("host attention", 2 + i, NUM_PARTS)
            num_bytes = 2 * shape.num_kv_heads * tokens * cache.row_bytes
            seconds = _attend_seconds(cache, attention, pool, tokens)
            cold.append((num_bytes, 1e6 * seconds[0]))
            warm.append((num_bytes, 1e6 * seconds[1]))
        scans = []
        retrieves = TidalDecode(
            inner=ExactTopK(budget_tokens=_KV_LEN // 32, dense_layers=0),
            select_layers=tuple(range(cache.num_layers)),
        )
        for i, policy in enumerate((Full(), retrieves)):
            on_progress("host scans", 2 + len(_TOKENS) + i, NUM_PARTS)
            scans.append(_scan_table(cache, policy, pool, shape.num_qo_heads, spread or Spread()))
        on_progress("host scans", NUM_PARTS, NUM_PARTS)
    attend_cold = CostTable.measured(cold)
    return {
        "attention_heads": (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim),
        "read_bandwidth": bandwidth,
        "attend_cold": attend_cold,
        # Noise must not make what is in a cache slower than what is not.
        "attend_warm": CostTable.measured(
            [(size, min(us, attend_cold.us(size))) for size, us in warm]
        ),
        "scan_dense": scans[0],
        "scan_retrieve": scans[1],
        "select_scale": {},
        "select_hidden": {},
        "select_ahead": typical_profile(1).select_ahead,
    }


def _attend_seconds(
    cache: AttentionCache, attention: DecodeAttention, pool: WorkerPool, tokens: int
) -> tuple[float, float]:
    """Median seconds of one layer, with rows that no cache holds and with rows just read."""
    step = attention.begin_step([cache.seq], [cache.kv_len])
    query = cache.random_query(attention.num_qo_heads)
    out = torch.empty_like(query)
    times: list[list[float]] = [[], []]
    for repeat in range(_REPEATS + 1):
        layer_idx = repeat % cache.num_layers
        indices = cache.random_selection(tokens, seed=repeat)
        measure_read_bandwidth(pool, query, repeats=2)  # workers spin, as inside a step
        for of_kind in times:
            seconds = attend_csr_rows(attention, layer_idx, step, query, out, indices)
            if repeat:  # the first one also loads code
                of_kind.append(seconds)
    cold, warm = (float(np.median(of_kind)) for of_kind in times)
    return cold, warm


def _scan_table(
    cache: AttentionCache, policy: Policy, pool: WorkerPool, num_qo_heads: int, spread: Spread
) -> CostTable:
    """Time of layers whose heads all attend to all tokens, by bytes of keys and values."""
    attention = DecodeAttention(policy, cache.store, num_qo_heads=num_qo_heads, pool=pool)
    query = cache.random_query(num_qo_heads)
    out = torch.empty_like(query)
    points = []
    for share in _SCAN_SHARES:
        kv_len = cache.kv_len // share
        step = attention.begin_step([cache.seq], [kv_len])
        times: list[float] = []
        for repeat in range(1 + -(-_REPEATS // cache.num_layers)):
            measure_read_bandwidth(pool, query, repeats=2)
            # In turns, as in a step: no layer is in a cache when its turn comes again.
            layers = attention.time_layers(step, [query] * cache.num_layers, out)
            if repeat:
                times += [seconds for seconds, _ in layers]
        num_bytes = 2 * cache.store.num_kv_heads * kv_len * cache.row_bytes
        # Short ones also differ by how soon a thread comes.
        median = spread.median(times) if share == _SCAN_SHARES[-1] else float(np.median(times))
        points.append((num_bytes, 1e6 * median))
    return CostTable.measured(points)
