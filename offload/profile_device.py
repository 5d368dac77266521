"""Measures what a GPU does in a decode step: each kind of kernel by itself, and the way to the CPU.

Kernels are timed in CUDA graphs of many calls over operands that no cache holds, as they run in a
step. What cannot be timed by itself, the round trip to the CPU and what a step costs beside its
kernels, comes from whole steps of a small model.

On CPU tensors everything but these steps runs too, by the reference code: for tests.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_ops.merge_state import merge_state
from gpu_ops.paged_attention import num_kv_splits, paged_decode_attention
from gpu_ops.rope_publish import rope_publish
from gpu_ops.window_attention import window_attention
from offload.device_linear import DeviceLayer, DeviceWeights, Norm, linear_path
from offload.machine_profile import CostTable, DeviceProfile, OnProgress, shape_key
from offload.sampling import SamplingOptions, TokenChooser

if TYPE_CHECKING:
    from offload.benchmarks.shapes import ModelShape

_ROUNDS = 5
_CALLS = 32  # in one graph
_COLD_BYTES = 512 * 2**20  # of operands in turns; the L2 of an H200 holds 60 MB
_KV_LENS = (256, 2048, 8192, 32768, 131072)  # that attention is measured at, all heads
_RETRIEVED_LENS, _RETRIEVED_TOKENS = (4096, 32768, 131072), 1024
_GATHERED_TOKENS = (64, 256, 1024, 4096)
_PAGE_TOKENS, _SINKS, _RECENT = 256, 4, 64
_COPY_BYTES = 256 * 2**20
NUM_PARTS = 6


def measure_device(
    device: torch.device,
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    rows: Sequence[int],
    driver: str | None,
    num_threads: int,
    scale: float = 1.0,
    on_progress: OnProgress = lambda what, done, total: None,
) -> DeviceProfile:
    """Measure `device`.

    Args:
        rows: numbers of sequences that linear layers are measured for.
        num_threads: of the worker pool that answers it.
        scale: of the operands' sizes; below 1 for tests.
    """
    bench = _DeviceBench(device, shape, dtype, scale)
    is_cuda = device.type == "cuda"

    def part(number: int, what: str) -> None:
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
        on_progress(f"GPU: {what}", number, NUM_PARTS)

    with torch.inference_mode(), _on(device):
        part(1, "memory")
        read = bench.read_bandwidth()
        to_host, from_host = bench.copy_bandwidths()
        part(2, "linear layers")
        gemv, linear, lm_head = bench.linear_layers(rows)
        part(3, "attention")
        attention, window_us, merge_us = bench.attention()
        sampling_us = bench.sampling_us()
        part(4, "top-k")
        retrieval, top_k = bench.retrieval()
        part(5, "rows of host pages")
        gather, gather_measured = bench.gather(from_host)
    part(6, "round trips")
    round_trip_us = step_us = 0.0
    properties: Any = None
    if is_cuda:
        round_trip_us, step_us = _round_trip(dtype, num_threads, window_us)
        properties = torch.cuda.get_device_properties(device)
    key = shape_key(shape, dtype.itemsize)
    return DeviceProfile(
        name=properties.name if is_cuda else "CPU tensors",
        driver=driver,
        capability=(properties.major, properties.minor) if is_cuda else (0, 0),
        num_multiprocessors=properties.multi_processor_count if is_cuda else 1,
        memory_bytes=properties.total_memory if is_cuda else 0,
        read_bandwidth=read,
        to_host_bandwidth=to_host,
        from_host_bandwidth=from_host,
        gemv=gemv,
        layer_linear_us={key: linear},
        lm_head_us={key: lm_head},
        attention=attention,
        retrieval=retrieval,
        top_k=top_k,
        gather=gather,
        gather_measured=gather_measured,
        window_us=window_us,
        merge_us=merge_us,
        sampling_us=sampling_us,
        round_trip_us=round_trip_us,
        step_us=step_us,
    )


def microseconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median time of a call, of `calls` captured one after the other."""
    for call in calls[:2]:
        call()  # loads kernels
    if device.type != "cuda":
        times = []
        for call in calls[:_ROUNDS]:
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return float(np.median(times))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    start_event, end_event = _events()
    for _ in range(_ROUNDS):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        times.append(start_event.elapsed_time(end_event) * 1e3 / len(calls))
    return float(np.median(times))


def _kernels(name: str) -> Any:
    """A module of `gpu_ops`, or None if this version has no such kernels."""
    try:
        return importlib.import_module(f"gpu_ops.{name}")
    except ModuleNotFoundError:
        return None


def _events() -> tuple[Any, Any]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


class _DeviceBench:
    """Operands of one model's shape on one device."""

    def __init__(
        self, device: torch.device, shape: ModelShape, dtype: torch.dtype, scale: float
    ) -> None:
        self.device, self.shape, self.dtype, self.scale = device, shape, dtype, scale
        self.heads = shape.num_qo_heads * shape.head_dim
        self.token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_multiprocessors = 1
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            self.num_multiprocessors = properties.multi_processor_count

    def sized(self, count: int, least: int = 1) -> int:
        return max(least, round(count * self.scale))

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float32, device=self.device).to(self.dtype)

    def read_bandwidth(self) -> float:
        """Bytes per second of this device's own memory: what a sum of much of it takes."""
        num_bytes = self.sized(_COLD_BYTES)
        data = torch.zeros(num_bytes // 4, dtype=torch.int32, device=self.device)
        out = torch.empty((), dtype=torch.int32, device=self.device)
        us = microseconds([lambda: torch.amax(data, 0, out=out)] * 4, self.device)
        return float(1e6 * num_bytes / us)

    def copy_bandwidths(self) -> tuple[float, float]:
        """Bytes per second to pinned host memory, and from it."""
        num_bytes = self.sized(_COPY_BYTES)
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        pinned = self.device.type == "cuda"
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        calls = (
            lambda: here.copy_(there, non_blocking=True),
            lambda: there.copy_(here, non_blocking=True),
        )
        to_host, from_host = (1e6 * num_bytes / microseconds([f] * 2, self.device) for f in calls)
        return float(to_host), float(from_host)

    def linear_layers(
        self, rows: Sequence[int]
    ) -> tuple[CostTable, dict[int, float], dict[int, float]]:
        """One row by bytes of a matrix; a layer, and the last projection, by number of rows."""
        shape, item = self.shape, self.dtype.itemsize
        layer_bytes = item * shape.hidden_size * (shape.qkv_width + 3 * shape.intermediate_size)
        count = max(2, min(8, -(-self.sized(_COLD_BYTES) // layer_bytes)))
        weights = self._weights(count)
        timed = {n: self._layer_us(weights, n) for n in rows}
        linear = {n: of_layer for n, (of_layer, _) in timed.items()}
        lm_head = {n: of_head for n, (_, of_head) in timed.items()}
        return self._gemv_table(weights), linear, lm_head

    def _layer_us(self, weights: DeviceWeights, n: int) -> tuple[float, float]:
        """Of a layer's linear layers, norms and rotation for `n` rows, and of the last projection."""
        path = linear_path(weights, n)
        x, attended = self.random(n, self.shape.hidden_size), self.random(n, self.heads)
        rotates = self._rotation(n)

        def whole(layer: DeviceLayer) -> None:
            rotates(path.qkv(layer, x))
            path.add_attention(layer, x, attended)
            path.add_mlp(layer, x)

        calls = [functools.partial(whole, layer) for layer in weights.layers]
        of_layer = microseconds(calls * max(1, _CALLS // len(calls)), self.device)
        path.finish(x)
        of_head = microseconds([functools.partial(path.logits, weights, x)] * 4, self.device)
        return of_layer, of_head

    def _gemv_table(self, weights: DeviceWeights) -> CostTable:
        """Each of a layer's matrices by itself, so that other shapes can be judged by them."""
        path, shape = linear_path(weights, 1), self.shape
        x, attended = self.random(1, shape.hidden_size), self.random(1, self.heads)

        def times(call: Callable[[DeviceLayer], Any]) -> float:
            calls = [lambda layer=layer: call(layer) for layer in weights.layers]
            return microseconds(calls * max(1, _CALLS // len(calls)), self.device)

        layer = weights.layers[0]
        points = [
            (layer.qkv[0].nbytes, times(lambda layer: path.qkv(layer, x))),
            (layer.o_proj[0].nbytes, times(lambda layer: path.add_attention(layer, x, attended))),
            (
                layer.gate_up[0].nbytes + layer.down[0].nbytes,
                times(lambda layer: path.add_mlp(layer, x)),
            ),
            (
                weights.lm_head[0].nbytes,
                microseconds([lambda: path.logits(weights, x)] * 4, self.device),
            ),
        ]
        return CostTable.measured(sorted(dict(points).items()))

    def attention(self) -> tuple[CostTable, float, float]:
        """Over pages of all heads, by bytes; then the window's and the merge's microseconds."""
        shape, device = self.shape, self.device
        longest = self.sized(max(_KV_LENS), _PAGE_TOKENS)
        layers = max(1, min(4, self.sized(_COLD_BYTES) // (longest * self.token_bytes) + 1))
        tables, keep = self._page_tables(longest, layers)
        query, out = self.random(1, self.heads), self.random(1, self.heads)
        points = {}
        for kv_len in sorted({self.sized(n, 1) for n in _KV_LENS}):
            # Short contexts at places of their own, or the caches would hold them.
            positions = torch.full((1,), kv_len - 1, dtype=torch.int64, device=device)
            pages = -(-kv_len // _PAGE_TOKENS)
            places = [
                table[:, first : first + pages].contiguous()
                for table in tables
                for first in range(0, table.shape[1] - pages + 1, pages)
            ][:_CALLS]

            calls = [self._attention_call(query, table, positions, out) for table in places]
            points[kv_len * self.token_bytes] = microseconds(calls, device)
        del keep
        return CostTable.measured(sorted(points.items())), *self._window_and_merge(query, out)

    def _attention_call(
        self, query: Tensor, table: Tensor, positions: Tensor, out: Tensor
    ) -> Callable[[], Any]:
        shape, device = self.shape, self.device
        splits = num_kv_splits(shape.num_kv_heads, self.num_multiprocessors)
        return functools.partial(
            paged_decode_attention,
            query,
            table,
            positions,
            num_kv_heads=shape.num_kv_heads,
            page_tokens=_PAGE_TOKENS,
            sm_scale=shape.head_dim**-0.5,
            partial_out=torch.zeros(1, shape.num_qo_heads, splits, shape.head_dim, device=device),
            partial_lse=torch.zeros(1, shape.num_qo_heads, splits, device=device),
            out=out,
        )

    def retrieval(self) -> tuple[CostTable, CostTable]:
        """All heads' attention that leaves scores, by bytes; and their top-k, by scores.

        By `gpu_ops.retrieval_attention` and `gpu_ops.top_k_tokens` where there are such kernels;
        else by attention without scores, and torch's top-k.
        """
        shape, device = self.shape, self.device
        attended, chosen = {}, {}
        group_size = shape.num_qo_heads // shape.num_kv_heads
        for wanted in _RETRIEVED_LENS:
            kv_len = self.sized(wanted, _PAGE_TOKENS)
            pages = -(-kv_len // _PAGE_TOKENS)
            (table,), keep = self._page_tables(pages * _PAGE_TOKENS, 1)
            positions = torch.full((1,), kv_len - 1, dtype=torch.int64, device=device)
            scores = torch.rand(
                1, shape.num_kv_heads, group_size, pages * _PAGE_TOKENS, device=device
            )
            lse = torch.zeros(1, shape.num_qo_heads, device=device)
            out = torch.zeros(1, self.heads, device=device)
            attend = self._retrieving_call(table, positions, scores, out, lse)
            choose = self._top_k_call(positions, scores, lse, kv_len)
            attended[kv_len * self.token_bytes] = microseconds([attend] * 8, device)
            chosen[shape.num_qo_heads * kv_len] = microseconds([choose] * 8, device)
            del keep
        return (
            CostTable.measured(sorted(attended.items())),
            CostTable.measured(sorted(chosen.items())),
        )

    def _retrieving_call(
        self, table: Tensor, positions: Tensor, scores: Tensor, out: Tensor, lse: Tensor
    ) -> Callable[[], Any]:
        shape = self.shape
        query = self.random(1, self.heads)
        module = _kernels("retrieval_attention")
        if module is None:
            return self._attention_call(query, table, positions, self.random(1, self.heads))
        splits = module.num_retrieval_splits(shape.num_kv_heads, self.num_multiprocessors)
        return functools.partial(
            module.retrieval_attention,
            query,
            table,
            positions,
            torch.arange(shape.num_kv_heads, dtype=torch.int32, device=self.device),
            group_size=shape.num_qo_heads // shape.num_kv_heads,
            page_tokens=_PAGE_TOKENS,
            sm_scale=shape.head_dim**-0.5,
            partial_out=torch.zeros(
                1, shape.num_qo_heads, splits, shape.head_dim, device=self.device
            ),
            partial_lse=torch.zeros(1, shape.num_qo_heads, splits, device=self.device),
            out=out,
            lse=lse,
            scores=scores,
        )

    def _top_k_call(
        self, positions: Tensor, scores: Tensor, lse: Tensor, kv_len: int
    ) -> Callable[[], Any]:
        shape, device = self.shape, self.device
        budget = min(_RETRIEVED_TOKENS, kv_len)
        module = _kernels("top_k_tokens")
        if module is None:
            importance = scores.sum(2)[0]
            k = budget
            found = torch.topk(importance, k, sorted=False)
            return lambda: torch.topk(
                importance, k, sorted=False, out=(found.values, found.indices)
            )
        lists = shape.num_kv_heads
        return functools.partial(
            module.top_k_tokens,
            scores,
            lse,
            positions,
            torch.arange(lists, dtype=torch.int32, device=device),
            sink_tokens=_SINKS,
            recent_tokens=_RECENT,
            budget_tokens=budget,
            shared=False,
            buffers=module.TopKBuffers.allocate(lists, scores.shape[-1], budget, device),
            selection=torch.zeros(1, lists, budget, dtype=torch.int32, device=device),
            counts=torch.zeros(1, lists, dtype=torch.int32, device=device),
        )

    def gather(self, from_host_bandwidth: float) -> tuple[CostTable, bool]:
        """Rows of host pages, by bytes, and whether the kernel for it was there."""
        module = _kernels("gather_rows")
        if module is None:
            return CostTable.straight(0.0, 1e6 / from_host_bandwidth), False
        shape, device = self.shape, self.device
        kv_len = self.sized(32768, _PAGE_TOKENS)
        pages = -(-kv_len // _PAGE_TOKENS)
        sizes = (pages, 2, shape.num_kv_heads, _PAGE_TOKENS, shape.head_dim)
        host = torch.zeros(sizes, dtype=self.dtype, pin_memory=device.type == "cuda")
        page_bytes = host[0].nbytes
        table = torch.arange(pages, dtype=torch.int64) * page_bytes + host.data_ptr()
        page_table = table[None].to(device)
        positions = torch.full((1,), kv_len - 1, dtype=torch.int64, device=device)
        heads = torch.arange(shape.num_kv_heads, dtype=torch.int32, device=device)
        points = {}
        for wanted in _GATHERED_TOKENS:
            chosen = min(self.sized(wanted, 8), kv_len - _SINKS - _RECENT)
            budget = chosen + _SINKS + _RECENT
            calls = [
                functools.partial(
                    module.gather_rows,
                    self._selection(kv_len, budget, seed).to(device),
                    torch.full((1, shape.num_kv_heads), budget, dtype=torch.int32, device=device),
                    page_table,
                    positions,
                    heads,
                    num_kv_heads=shape.num_kv_heads,
                    page_tokens=_PAGE_TOKENS,
                    sink_tokens=_SINKS,
                    recent_tokens=_RECENT,
                    out=self.random(1, 2, shape.num_kv_heads, chosen, shape.head_dim),
                )
                for seed in range(8)
            ]
            points[chosen * self.token_bytes] = microseconds(calls, device)
        return CostTable.measured(sorted(points.items())), True

    def sampling_us(self) -> float:
        """Choosing the likeliest token."""
        logits = self.random(1, self.shape.vocab_size)
        chooser = TokenChooser(1, self.shape.vocab_size, self.device)
        chooser.use(SamplingOptions())
        return microseconds([lambda: chooser.choose(logits, samples=False)] * 8, self.device)

    def _selection(self, kv_len: int, budget: int, seed: int) -> Tensor:
        """int32 [1, num_kv_heads, budget]: sinks, sorted random tokens, recent tokens."""
        rng = np.random.default_rng(seed)
        middle = budget - _SINKS - _RECENT
        rows = [
            np.concatenate(
                [
                    np.arange(_SINKS),
                    np.sort(rng.choice(kv_len - _SINKS - _RECENT, middle, replace=False)) + _SINKS,
                    np.arange(kv_len - _RECENT, kv_len),
                ]
            )
            for _ in range(self.shape.num_kv_heads)
        ]
        return torch.from_numpy(np.stack(rows).astype(np.int32))[None]

    def _page_tables(self, kv_len: int, layers: int) -> tuple[list[Tensor], Tensor]:
        """Addresses of zeroed pages on the device, and what keeps them alive."""
        shape, pages = self.shape, -(-kv_len // _PAGE_TOKENS)
        memory = torch.zeros(
            layers,
            pages,
            *(2, shape.num_kv_heads, _PAGE_TOKENS, shape.head_dim),
            dtype=self.dtype,
            device=self.device,
        )
        first = torch.arange(layers * pages, dtype=torch.int64) * memory[0, 0].nbytes
        addresses = (first + memory.data_ptr()).view(layers, 1, pages)
        return list(addresses.to(self.device)), memory

    def _window_and_merge(self, query: Tensor, out: Tensor) -> tuple[float, float]:
        shape, device = self.shape, self.device
        sizes = (1, 2, shape.num_kv_heads, _SINKS + _RECENT, shape.head_dim)
        windows = [self.random(*sizes) for _ in range(8)]
        position = torch.full((1,), 100_000, dtype=torch.int64, device=device)
        o = torch.zeros(1, self.heads, device=device)
        lse = torch.zeros(1, shape.num_qo_heads, device=device)
        window_us = microseconds(
            [
                lambda window=window: window_attention(
                    query, window, position, sm_scale=shape.head_dim**-0.5, out=o, lse=lse
                )
                for window in windows * 4
            ],
            device,
        )
        pinned = device.type == "cuda"
        from_host = torch.zeros(1, self.heads, pin_memory=pinned)
        host_lse = torch.zeros(1, shape.num_qo_heads, pin_memory=pinned)
        merge_us = microseconds(
            [lambda: merge_state(o, lse, from_host, host_lse, out)] * _CALLS, device
        )
        return window_us, merge_us

    def _rotation(self, n: int) -> Callable[[Tensor], None]:
        """What rotates queries and keys and writes them where a layer with a window has them."""
        shape, device = self.shape, self.device
        pinned = device.type == "cuda"
        cos, sin = self.random(n, shape.head_dim), self.random(n, shape.head_dim)
        query = self.random(n, self.heads)
        sizes = (n, 2, shape.num_kv_heads, _SINKS + _RECENT, shape.head_dim)
        window = self.random(*sizes)
        host_query = torch.zeros(n, self.heads, dtype=self.dtype, pin_memory=pinned)
        host_kv = torch.zeros(
            n, 2, shape.num_kv_heads, shape.head_dim, dtype=self.dtype, pin_memory=pinned
        )
        positions = torch.full((n,), 100_000, dtype=torch.int64, device=device)

        def rotates(qkv: Tensor) -> None:
            rope_publish(
                qkv,
                cos,
                sin,
                positions,
                num_kv_heads=shape.num_kv_heads,
                query=query,
                host_query=host_query,
                host_kv=host_kv,
                window=window,
                sink_tokens=_SINKS,
            )

        return rotates

    def _weights(self, count: int) -> DeviceWeights:
        shape, hidden = self.shape, self.shape.hidden_size

        def matrix(outputs: int, inputs: int) -> tuple[Tensor, None]:
            made = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
            return made.normal_(0.0, 0.02), None

        def norm() -> Norm:
            return torch.ones(hidden, dtype=self.dtype, device=self.device), 1e-5

        layers = tuple(
            DeviceLayer(
                input_norm=norm(),
                qkv=matrix(shape.qkv_width, hidden),
                q_norm=None,
                k_norm=None,
                qk_norm_eps=0.0,
                o_proj=matrix(hidden, self.heads),
                mlp_norm=norm(),
                gate_up=matrix(2 * shape.intermediate_size, hidden),
                down=matrix(hidden, shape.intermediate_size),
            )
            for _ in range(count)
        )
        return DeviceWeights(layers, norm(), matrix(shape.vocab_size, hidden))


def _round_trip(dtype: torch.dtype, num_threads: int, window_us: float) -> tuple[float, float]:
    """(round_trip_us, step_us) from steps of a small model with and without the CPU's side.

    The CPU attends to nothing. What is left of a step without the CPU's side when its kernels are
    taken away is what a step costs beside them; the kernels are timed on the GPU, in one more run.
    """
    from offload.benchmarks.pipeline import measure_pipeline
    from offload.benchmarks.pipeline_session import PipelineSettings, opened_session
    from offload.policies import make_policy

    policy = make_policy("streaming_llm", budget_tokens=68, sink_tokens=4, dense_layers=0)
    steps: dict[str, float] = {}
    gpu_us = 0.0
    num_layers = 1
    for host_work in ("none", "attend"):
        settings = PipelineSettings(
            shape="smollm2-135m",
            kv_len=512,
            policy=policy,
            backend="graph",
            num_steps=48,
            num_threads=num_threads,
            dtype=dtype,
            distinct_layers=1,
            host_work=host_work,
        )
        with opened_session(settings) as session:
            traced = 8 if host_work == "attend" else 0
            measured, timelines = measure_pipeline(session, repeats=2, traced_steps=traced)
            steps[host_work] = 1e3 * measured.milliseconds
            if timelines:
                num_layers = sum(1 for mark in timelines[0].gpu if mark.kind == "window")
                gpu_us = float(
                    np.median(
                        [
                            sum(m.end_ns - m.start_ns for m in t.gpu if m.kind != "wait") / 1e3
                            for t in timelines
                        ]
                    )
                )
                marks = len(timelines[0].gpu)
                gpu_us -= marks * _mark_us()
    waited = (steps["attend"] - steps["none"]) / max(1, num_layers)
    # What is waited for begins with the window's attention.
    return max(0.0, waited) + window_us, max(0.0, steps["none"] - gpu_us)


def _mark_us() -> float:
    """Of one mark of a trace, which a step without marks does not have."""
    from offload.benchmarks.gpu_marks import GpuMarks

    device = torch.device("cuda")
    marks = GpuMarks(device)

    def mark() -> None:
        marks.mark("mark")

    return microseconds([mark] * _CALLS, device)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
