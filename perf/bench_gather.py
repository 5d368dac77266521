"""The same selected rows of host KV: the CPU attends to them, or the GPU fetches them and attends.

`python -m perf.bench_gather` on a machine with a GPU: one layer of Llama-3.1-8B's shape over
131,072 tokens in a pinned host store, batch 1, bf16. Half of a selection is in runs of eight
tokens, half is strewn. Every call reads other tokens, in turns of several layers.

    gather    gather_rows alone
    exposed   gather_rows, then gathered_attention, in a CUDA graph: what a step would wait for
    CPU       DecodeAttention over an explicit selection, merging included, in one call; the call
              from Python is part of the time (some 2 us)

`--launch` tries launches of gather_rows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.bandwidth import measure_read_bandwidth
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.gather_rows import GatherLaunch, gather_rows
from gpu_ops.gathered_attention import gathered_attention, num_gathered_splits
from offload.bench.made.attention_cache import AttentionCache
from offload.decode.attention import DecodeAttention
from offload.models.shape import MODEL_SHAPES
from offload.policies import Full
from perf.gpu_timing import (
    DTYPE,
    GROUP_SIZE,
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    ROW_BYTES,
    SM_SCALE,
    checked_error,
    graph_microseconds,
    launch_option,
    launches,
    print_kernels,
    require_gpu,
)
from perf.results_file import Run, script_options
from perf.tables.placement_tables import gpu_gather_table

SINK_TOKENS, RECENT_TOKENS = 4, 64  # in every list, and never gathered
RUN_TOKENS = 8
Indices = npt.NDArray[np.int32]
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = script_options(__doc__, "gpu-gather")
    parser.add_argument("--kv-len", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=4, help="that take turns")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--threads", nargs="*", type=int, default=[4, 8, 15], help="of the CPU")
    parser.add_argument("--selections", type=int, default=32, help="of each point")
    parser.add_argument("--rounds", type=int, default=9, help="of a graph over all selections")
    parser.add_argument("--heads", nargs="+", type=int, default=[KV_HEADS], help="KV heads fetched")
    launch_option(parser, "--launch", GatherLaunch)
    parser.add_argument("--profile", action="store_true", help="also print the kernels' times")
    options = parser.parse_args(arguments)
    least = SINK_TOKENS + RECENT_TOKENS + 2 * max(options.tokens)
    if options.kv_len < least:
        parser.error(f"--kv-len must be at least {least} for these --tokens, got {options.kv_len}")
    if min(options.tokens) < 1 or not set(options.heads) <= set(range(1, KV_HEADS + 1)):
        parser.error(f"--tokens must be at least 1, and --heads in [1, {KV_HEADS}]")
    require_gpu()
    run = Run(options)
    cache = AttentionCache(
        MODEL_SHAPES["llama-3.1-8b"],
        min_layers=options.layers,
        max_layers=options.layers,
        kv_len=options.kv_len,
        dtype=DTYPE,
        pinned=True,
    )
    with closing(cache), torch.inference_mode():
        rows = Bench(cache, options).measure()
    settings = run.named("kv_len", "layers", "selections", "rounds")
    print(gpu_gather_table(run.write(settings, rows)))
    return 0


def clustered_selection(
    rng: np.random.Generator, kv_len: int, tokens: int, num_units: int = KV_HEADS
) -> Indices:
    """int32 [num_units, tokens]: sorted, no sinks and no recent ones, half of them in runs."""
    first, last = SINK_TOKENS, kv_len - RECENT_TOKENS
    rows = []
    for _ in range(num_units):
        runs = rng.choice((last - first) // RUN_TOKENS, tokens // 2 // RUN_TOKENS, replace=False)
        in_runs = (first + runs[:, None] * RUN_TOKENS + np.arange(RUN_TOKENS)).reshape(-1)
        is_free = np.ones(kv_len, bool)
        is_free[:first] = is_free[last:] = False
        is_free[in_runs] = False
        strewn = rng.choice(np.flatnonzero(is_free), tokens - len(in_runs), replace=False)
        rows.append(np.sort(np.concatenate((in_runs, strewn))))
    return np.stack(rows).astype(np.int32)


@dataclass(frozen=True)
class Point:
    """Tokens of each of some KV heads, and selections of them in turns."""

    tokens: int
    heads: int
    selections: list[Indices]  # each [KV_HEADS, tokens]

    @property
    def num_bytes(self) -> int:
        """Keys and values of one call."""
        return self.tokens * self.heads * ROW_BYTES

    def row(self, engine: str, microseconds: float, relative_error: float) -> Row:
        """A line of the results."""
        return {
            "engine": engine,
            "tokens": self.tokens,
            "heads": self.heads,
            "microseconds": microseconds,
            "gigabytes_per_second": self.num_bytes / microseconds / 1e3,
            "relative_error": relative_error,
        }


class Bench:
    """A cache, a query, and what attends."""

    def __init__(self, cache: AttentionCache, options: argparse.Namespace) -> None:
        self.cache, self.options = cache, options
        self.query = cache.random_query(QO_HEADS)
        self.keys, self.values = cache.store.gather(cache.seq, 0)
        self.pages = cache.store.page_table(cache.seq)
        self.rng = np.random.default_rng(2)

    def measure(self) -> list[Row]:
        """Rows of all points and engines."""
        rows = []
        points = list(itertools.product(self.options.tokens, self.options.heads))
        for tokens, heads in points:
            rows += self._gpu_rows(self._point(tokens, heads))
        for num_threads in self.options.threads:
            with closing(WorkerPool(num_threads)) as pool:
                attention = DecodeAttention(
                    Full(), self.cache.store, num_qo_heads=QO_HEADS, pool=pool
                )
                for tokens, heads in points:
                    rows.append(self._cpu_row(self._point(tokens, heads), attention, pool))
        return rows

    def _point(self, tokens: int, heads: int) -> Point:
        """With selections that no engine has seen, so that no cache holds their rows."""
        selections = [
            clustered_selection(self.rng, self.cache.kv_len, tokens)
            for _ in range(self.options.selections)
        ]
        return Point(tokens, heads, selections)

    def _gpu_rows(self, point: Point) -> list[Row]:
        """Of each launch."""
        device_point = DevicePoint(point, self.query, self.cache)
        rows = []
        for launch in launches(GatherLaunch(), self.options.launch):
            error = self._check(device_point.fresh_output(launch), point)
            gather, exposed = (
                graph_microseconds(device_point.calls(launch, attends), rounds=self.options.rounds)
                for attends in (False, True)
            )
            measured = {
                "launch": asdict(launch),
                "gather_microseconds": gather,
                "gather_gigabytes_per_second": point.num_bytes / gather / 1e3,
            }
            rows.append(point.row("GPU", exposed, error) | measured)
            print(
                f"GPU {point.tokens:6} tokens {point.heads} heads gather {gather:8.1f} us, "
                f"exposed {exposed:8.1f} us, {launch}",
                flush=True,
            )
            if self.options.profile:
                print_kernels(device_point.calls(launch, True))
        return rows

    def _check(self, out: Tensor, point: Point) -> float:
        """Relative L2 error of `out` [QO_HEADS * HEAD_DIM], of layer 0 and the first selection."""
        expected = []
        for kv_head in range(point.heads):
            tokens = torch.from_numpy(point.selections[0][kv_head]).long()
            q = self.query.view(KV_HEADS, GROUP_SIZE, HEAD_DIM)[kv_head].double()
            k, v = (x[kv_head, tokens].double() for x in (self.keys, self.values))
            expected.append((q @ k.T * SM_SCALE).softmax(-1) @ v)
        o = torch.stack(expected).flatten()
        return checked_error(f"the output of {point.tokens} tokens", out.cpu()[: len(o)], o)

    def _cpu_row(self, point: Point, attention: DecodeAttention, pool: WorkerPool) -> Row:
        out, lse = torch.empty_like(self.query), torch.empty(1, QO_HEADS)
        indptr = np.minimum(np.arange(KV_HEADS + 1), point.heads).astype(np.int64) * point.tokens
        seconds = []
        for i, selection in enumerate(point.selections):
            measure_read_bandwidth(pool, self.query, repeats=2)  # workers spin, as within a step
            pages = self.pages[i % len(self.pages)].ctypes.data
            indices = selection[: point.heads].reshape(-1)
            start = time.perf_counter()
            attention.native.attend_csr(
                self.query.data_ptr(),
                out.data_ptr(),
                lse.data_ptr(),
                pages,
                self.cache.kv_len,
                indptr,
                indices,
                0,
            )
            seconds.append(time.perf_counter() - start)
            if i == 0:
                error = self._check(out[0], point)
        p10, median, p90 = (1e6 * float(t) for t in np.percentile(seconds, [10, 50, 90]))
        print(
            f"CPU {point.tokens:6} tokens {point.heads} heads {median:8.1f} us"
            f" ({p10:.1f}-{p90:.1f}), {pool.num_threads} threads",
            flush=True,
        )
        spread = {"microseconds_p10": p10, "microseconds_p90": p90}
        return point.row("CPU", median, error) | {"threads": pool.num_threads} | spread


class DevicePoint:
    """A point's lists and buffers on the GPU."""

    def __init__(self, point: Point, query: Tensor, cache: AttentionCache) -> None:
        kv_len = cache.kv_len
        sinks = np.arange(SINK_TOKENS)
        recent = np.arange(kv_len - RECENT_TOKENS, kv_len)
        lists = [
            np.stack([np.concatenate((sinks, of_head, recent)) for of_head in selection])
            for selection in point.selections
        ]
        self.lists = torch.from_numpy(np.stack(lists).astype(np.int32))[:, None].cuda()
        count = SINK_TOKENS + point.tokens + RECENT_TOKENS
        self.counts = torch.full((1, KV_HEADS), count, dtype=torch.int32, device="cuda")
        self.tables = torch.from_numpy(cache.store.page_table(cache.seq).copy())[:, None].cuda()
        self.position = torch.tensor([kv_len - 1], device="cuda")
        self.heads = torch.arange(point.heads, dtype=torch.int32, device="cuda")
        shape = (1, 2, point.heads, point.tokens, HEAD_DIM)
        self.gathered = torch.empty(shape, dtype=DTYPE, device="cuda")
        self.page_tokens = cache.store.page_tokens
        self.query = query.cuda()
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        num_splits = num_gathered_splits(point.heads, point.tokens, multiprocessors)
        slots = (1, point.heads * GROUP_SIZE, num_splits)
        self.partial_out = torch.empty(*slots, HEAD_DIM, device="cuda")
        self.partial_lse = torch.empty(*slots, device="cuda")
        # In place of a window's result. Each call merges into what the one before left, which
        # takes as long as any.
        self.out = torch.zeros(1, QO_HEADS * HEAD_DIM, device="cuda")
        self.lse = torch.zeros(1, QO_HEADS, device="cuda")

    def fresh_output(self, launch: GatherLaunch) -> Tensor:
        """[QO_HEADS * HEAD_DIM] of the first selection, of layer 0, without a window."""
        self.gathered.fill_(float("nan"))
        self.out.fill_(float("nan"))
        self.lse.fill_(float("-inf"))
        self.run(0, launch, True)
        found = self.out[0].clone()
        self.out.zero_()
        self.lse.zero_()
        return found

    def calls(self, launch: GatherLaunch, attends: bool) -> list[Callable[[], None]]:
        """One of each selection."""
        return [partial(self.run, i, launch, attends) for i in range(len(self.lists))]

    def run(self, i: int, launch: GatherLaunch, attends: bool) -> None:
        """Selection i, of layer i in turn."""
        gather_rows(
            self.lists[i],
            self.counts,
            self.tables[i % len(self.tables)],
            self.position,
            self.heads,
            num_kv_heads=KV_HEADS,
            page_tokens=self.page_tokens,
            sink_tokens=SINK_TOKENS,
            recent_tokens=RECENT_TOKENS,
            out=self.gathered,
            launch=launch,
        )
        if attends:
            gathered_attention(
                self.query,
                self.gathered,
                self.counts,
                self.position,
                self.heads,
                group_size=GROUP_SIZE,
                sink_tokens=SINK_TOKENS,
                recent_tokens=RECENT_TOKENS,
                sm_scale=SM_SCALE,
                partial_out=self.partial_out,
                partial_lse=self.partial_lse,
                out=self.out,
                lse=self.lse,
            )


if __name__ == "__main__":
    sys.exit(main())
