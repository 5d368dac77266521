"""Measures what a GPU does in a decode step: each kind of kernel by itself, and the way to the CPU.

Kernels are timed in CUDA graphs of many calls over operands that no cache holds, as they run in a
step. What cannot be timed by itself, the round trip to the CPU and what a step costs beside its
kernels, comes from whole steps (`steps`).

On CPU tensors everything but these steps runs too, by the reference code: for tests.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpu_ops.decoder_layers import Norm
from gpu_ops.linear import GpuLinear
from gpu_ops.rope_publish import rope_publish
from offload.decode.gpu.linear import DeviceLayer, DeviceWeights, LinearPath, linear_path
from offload.decode.sampling import TokenChooser
from offload.measuring.machine.kernels import (
    CALLS,
    COLD_BYTES,
    RECENT,
    SINKS,
    Operands,
    microseconds,
)
from offload.measuring.machine.layers import LayerBench
from offload.measuring.machine.steps import device_step_us
from offload.planning.cost_table import CostTable
from offload.planning.profile import DeviceProfile, OnProgress, shape_key

if TYPE_CHECKING:
    from offload.models.shape import ModelShape

_COPY_BYTES = 256 * 2**20
NUM_PARTS = 7


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
        scale: of the operands' sizes; below 1 for tests.
    """
    bench = _LinearBench(device, shape, dtype, scale)
    attends = LayerBench(device, shape, dtype, scale)
    is_cuda = device.type == "cuda"
    on_device = torch.cuda.device(device) if is_cuda else nullcontext()

    def part(number: int, what: str) -> None:
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
        on_progress(f"GPU: {what}", number, NUM_PARTS)

    with torch.inference_mode(), on_device:
        part(1, "memory")
        read = bench.read_bandwidth()
        to_host, from_host = bench.copy_bandwidths()
        part(2, "linear layers")
        gemv, linear, lm_head = bench.linear_layers(rows)
        part(3, "attention")
        attention, window_us, merge_us = attends.attention()
        sampling_us = bench.sampling_us()
        part(4, "top-k")
        retrieval, top_k = attends.retrieval()
        part(5, "rows of host pages")
        gather = attends.gather()
        part(6, "layers with other work")
        linears = bench.layer_calls()
        top_k_beside = attends.top_k_beside(linears)
        gather_beside = attends.gather_beside(linears)
        del linears
    part(7, "round trips")
    step_times = 0.0, 0.0, 0.0
    properties: Any = None
    if is_cuda:
        step_times = device_step_us(device, dtype, num_threads, window_us)
        properties = torch.cuda.get_device_properties(device)
    round_trip_us, step_us, burst_step_us = step_times
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
        gather_measured=True,
        gather_beside=gather_beside,
        top_k_beside=top_k_beside,
        window_us=window_us,
        merge_us=merge_us,
        sampling_us=sampling_us,
        round_trip_us=round_trip_us,
        step_us=step_us,
        burst_step_us=burst_step_us,
    )


class _LinearBench(Operands):
    """What is not attention."""

    def read_bandwidth(self) -> float:
        """Bytes per second of this device's own memory: what a sum of much of it takes."""
        num_bytes = self.sized(COLD_BYTES)
        data = torch.zeros(num_bytes // 4, dtype=torch.int32, device=self.device)
        out = torch.empty((), dtype=torch.int32, device=self.device)
        us = microseconds([lambda: torch.amax(data, 0, out=out)] * 4, self.device)
        return float(1e6 * num_bytes / us)

    def copy_bandwidths(self) -> tuple[float, float]:
        """Bytes per second to pinned host memory, and from it."""
        num_bytes = self.sized(_COPY_BYTES)
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.pinned)
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
        count = max(2, min(8, -(-self.sized(COLD_BYTES) // layer_bytes)))
        weights = self._weights(count)
        linear, lm_head = {}, {}
        for n in rows:
            path, calls = self._whole_layers(weights, n)
            linear[n] = microseconds(calls * max(1, CALLS // len(calls)), self.device)
            x = self.random(n, shape.hidden_size)
            path.finish(x)
            last = functools.partial(path.logits, weights, x)
            lm_head[n] = microseconds([last] * 4, self.device)
        return self._gemv_table(weights), linear, lm_head

    def layer_calls(self) -> list[Callable[[], None]]:
        """Linear layers and rotation of some layers, for one row."""
        return self._whole_layers(self._weights(max(2, self.sized(4))), 1)[1]

    def _whole_layers(
        self, weights: DeviceWeights, n: int
    ) -> tuple[LinearPath, list[Callable[[], None]]]:
        path = linear_path(weights, n)
        x, attended = self.random(n, self.shape.hidden_size), self.random(n, self.heads)
        rotates = self._rotation(n)

        def whole(layer: DeviceLayer) -> None:
            rotates(path.qkv(layer, x))
            path.add_attention(layer, x, attended)
            path.add_mlp(layer, x)

        return path, [functools.partial(whole, layer) for layer in weights.layers]

    def _gemv_table(self, weights: DeviceWeights) -> CostTable:
        """Each of a layer's matrices by itself, so that other shapes can be judged by them."""
        path, shape = linear_path(weights, 1), self.shape
        x, attended = self.random(1, shape.hidden_size), self.random(1, self.heads)

        def times(call: Callable[[DeviceLayer], Any]) -> float:
            calls = [lambda layer=layer: call(layer) for layer in weights.layers]
            return microseconds(calls * max(1, CALLS // len(calls)), self.device)

        layer = weights.layers[0]
        mlp = (layer.gate_up, layer.down, layer.routed)
        mlp_bytes = sum(weights.num_bytes for weights in mlp if weights is not None)
        last_us = microseconds([lambda: path.logits(weights, x)] * 4, self.device)
        points = {
            layer.qkv.num_bytes: times(lambda layer: path.qkv(layer, x)),
            layer.o_proj.num_bytes: times(lambda layer: path.add_attention(layer, x, attended)),
            mlp_bytes: times(lambda layer: path.add_mlp(layer, x)),
            weights.lm_head.num_bytes: last_us,
        }
        return CostTable.measured(sorted(points.items()))

    def sampling_us(self) -> float:
        """Choosing the likeliest token."""
        logits = self.random(1, self.shape.vocab_size)
        chooser = TokenChooser(1, self.shape.vocab_size, self.device)
        return microseconds([lambda: chooser.choose(logits)] * 8, self.device)

    def _rotation(self, n: int) -> Callable[[Tensor], Any]:
        """What rotates queries and keys and writes them where a layer with a window has them."""
        shape, device = self.shape, self.device
        sizes = (n, 2, shape.num_kv_heads, SINKS + RECENT, shape.head_dim)
        host_kv = (n, 2, shape.num_kv_heads, shape.head_dim)
        return functools.partial(
            rope_publish,
            cos=self.random(n, shape.head_dim),
            sin=self.random(n, shape.head_dim),
            positions=torch.full((n,), 100_000, dtype=torch.int64, device=device),
            num_kv_heads=shape.num_kv_heads,
            query=self.random(n, self.heads),
            host_query=torch.zeros(n, self.heads, dtype=self.dtype, pin_memory=self.pinned),
            host_kv=torch.zeros(host_kv, dtype=self.dtype, pin_memory=self.pinned),
            window=self.random(*sizes),
            sink_tokens=SINKS,
        )

    def _weights(self, count: int) -> DeviceWeights:
        shape, hidden = self.shape, self.shape.hidden_size

        def matrix(outputs: int, inputs: int) -> GpuLinear:
            made = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
            return GpuLinear(made.normal_(0.0, 0.02))

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
        return DeviceWeights(shape, layers, norm(), matrix(shape.vocab_size, hidden))
