"""Measures what a decode step costs without its kernels, by whole steps as the runtime runs them.

What Python, launches and the coming and going of threads take depends on what ran just before: a
call that takes 50 us in a loop takes 200 us after a wait during which every other thread was busy.
So nothing here is timed by itself: steps of a small model are, and what is known is taken away.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.huge_pages import move_to_huge_pages
from offload.measuring.machine.kernels import CALLS, microseconds
from offload.measuring.steps.gpu_marks import GpuMarks
from offload.measuring.steps.measure import WARM_UP_STEPS, measure_steps
from offload.measuring.steps.session import DecodeSession, text_session
from offload.measuring.synthetic.random_model import random_model
from offload.models.shape import MODEL_SHAPES, ModelShape, layer_elements
from offload.planning.profile import shape_key
from offload.policies import Full, Policy, StreamingLLM
from offload.runtime.config import runtime_config
from offload.runtime.model_loading import prepare_loaded
from offload.runtime.runtime import Runtime
from offload.system.memory import host_memory_limit_bytes

_NUM_STEPS, _TRACED_STEPS = 48, 8
_KV_LEN = 512
_SHORT_KV_LEN = 16
_WEIGHT_BYTES = 2**29  # of the layers that are measured on a host: more than caches hold


def opened_session(
    stock: Any, policy: Policy, *, kv_len: int, num_steps: int = _NUM_STEPS, **options: Any
) -> DecodeSession:
    """Steps of `stock` after `kv_len` made tokens.

    Args:
        options: of `RuntimeConfig`.
    """
    runtime = Runtime(prepare_loaded(stock, runtime_config(policy=policy, **options), None))
    tokens = torch.arange(kv_len + num_steps) % stock.config.vocab_size
    return text_session(runtime, tokens, kv_len, num_steps, weight_bytes=0)


def device_step_us(
    device: torch.device, dtype: torch.dtype, num_threads: int, window_us: float
) -> tuple[float, float, float]:
    """(round_trip_us, step_us, burst_step_us) of a `DeviceProfile`.

    Everything on the GPU: a step's time less its kernels' is `step_us`, or in a burst
    `burst_step_us`. Every layer asked of a CPU that has nothing to attend to: what is more than
    `step_us`, by layers, is waited for, and waiting begins with the window's attention.
    """
    shape = MODEL_SHAPES["smollm2-135m"]
    stock = random_model(shape, device=device, dtype=dtype)
    everywhere = HeadPlacement.filled(shape.num_layers, shape.num_kv_heads, Place.GPU)
    idle = StreamingLLM(budget_tokens=68, sink_tokens=4, dense_layers=0)
    marks = GpuMarks(device)
    mark_us = microseconds([functools.partial(marks.mark, "mark")] * CALLS, device)
    single, burst = [], []
    for policy, placement in ((Full(), everywhere), (idle, None)):
        options: dict[str, Any] = {
            "device": device,
            "num_threads": num_threads,
            "placement": placement,
        }
        with closing(opened_session(stock, policy, kv_len=_KV_LEN, **options)) as session:
            whole, timelines = measure_steps(session, repeats=2, traced_steps=_TRACED_STEPS)
            session.rewind()
            seconds = [_seconds_of(session.step) for _ in range(_NUM_STEPS)]
        busy_ns = [sum(m.end_ns - m.start_ns for m in t.gpu if m.kind != "wait") for t in timelines]
        kernels_us = float(np.median(busy_ns)) / 1e3 - len(timelines[0].gpu) * mark_us
        single.append(1e6 * float(np.median(seconds[WARM_UP_STEPS:])) - kernels_us)
        burst.append(1e3 * whole.milliseconds - kernels_us)
    round_trip_us = max(0.0, single[1] - single[0]) / shape.num_layers + window_us
    return round_trip_us, max(0.0, single[0]), max(0.0, burst[0])


def host_step_us(
    shape: ModelShape, dtype: torch.dtype, num_threads: int
) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]], float]:
    """(layer_linear_us, lm_head_us, step_us) of a `MachineProfile` without a GPU; for one row.

    Empty, and 0, where there is no memory for the layers and the last projection.
    """
    item = dtype.itemsize
    layer_bytes = item * layer_elements(shape)
    layers = max(2, min(shape.num_layers, _WEIGHT_BYTES // layer_bytes))
    num_bytes = layers * layer_bytes + 2 * item * shape.vocab_size * shape.hidden_size
    if 2 * num_bytes > host_memory_limit_bytes():  # once more while they move to huge pages
        return {}, {}, 0.0
    part = replace(shape, num_layers=layers, rope_theta=10_000.0)  # a config's shape has none
    stock = random_model(part, device=torch.device("cpu"), dtype=dtype, seed=None)
    move_to_huge_pages(stock)
    options: dict[str, Any] = {"device": "cpu", "num_threads": num_threads}
    with closing(opened_session(stock, Full(), kv_len=_SHORT_KV_LEN, **options)) as session:
        decoder: Any = session.decoder
        whole_us = 1e3 * measure_steps(session, repeats=2, traced_steps=0)[0].milliseconds
        session.rewind()
        of_layers = _timed(decoder, "_run_layers")
        of_last = _timed(decoder, "logits")
        session.decode(_NUM_STEPS)
        layers_us, last_us = (
            1e6 * float(np.median(seconds[WARM_UP_STEPS:])) for seconds in (of_layers, of_last)
        )
        attend_us = layers * _attend_us(decoder)
    key = shape_key(shape, item)
    return (
        {key: {1: max(0.0, layers_us - attend_us) / layers}},
        {key: {1: last_us}},
        max(0.0, whole_us - layers_us - last_us),
    )


def _seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed(owner: Any, name: str) -> list[float]:
    """Seconds of each call of a method from now on."""
    seconds: list[float] = []
    call: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    return seconds


def _attend_us(decoder: Any) -> float:
    """Time of one layer's attention to such a short sequence, by itself."""
    store, attention, shape = decoder.store, decoder.attention, decoder.model.shape
    seq = store.new_sequence()
    try:
        store.reserve([seq], [_SHORT_KV_LEN])
        rows = torch.ones(_SHORT_KV_LEN, shape.num_kv_heads, shape.head_dim, dtype=store.dtype)
        for layer_idx in range(shape.num_layers):
            store.append(seq, layer_idx, rows, rows, start=0)
        store.commit([seq], [_SHORT_KV_LEN])
        step = attention.begin_step([seq], [_SHORT_KV_LEN])
        query = torch.ones(1, shape.num_qo_heads * shape.head_dim, dtype=store.dtype)
        times: list[float] = []
        for _ in range(_TRACED_STEPS):
            layers = attention.time_layers(
                step, [query] * shape.num_layers, torch.empty_like(query)
            )
            times += [1e6 * seconds for seconds, _ in layers]
    finally:
        store.free(seq)
    return float(np.median(times))
