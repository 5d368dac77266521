"""What `offload bench pipeline` decodes with: a model of random weights over made caches.

A backend is a function from settings, model and caches to a `CacheSession`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.bench.pipeline.device_session import CacheSession, DeviceSession
from offload.bench.pipeline.settings import PipelineSettings
from offload.decode.cpu import NativeDecoder
from offload.measuring.steps.gpu_marks import START, GpuMarks
from offload.measuring.steps.step_timeline import Interval, StepTimeline
from offload.measuring.steps.worker_tasks import worker_tasks
from offload.measuring.synthetic.model_cache import ModelCache, structured_model_cache
from offload.measuring.synthetic.random_model import random_model
from offload.models import lean_model_maker
from offload.models.shape import MODEL_SHAPES
from offload.policies import Policy

HOST_WORK = ("attend", "none")


@contextmanager
def opened_session(
    settings: PipelineSettings, *, on_layer: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[CacheSession]:
    """Model, caches and decoder, made for `settings` and given back afterwards.

    Raises:
        As `check_settings`; HostBudgetError: caches that do not fit.
    """
    check_settings(settings)
    stock = make_model(settings)
    with (
        closing(make_cache(settings, stock, [settings.policy], on_layer=on_layer)) as cache,
        closing(open_session(settings, stock, cache)) as session,
    ):
        yield session


def check_settings(settings: PipelineSettings) -> None:
    """Refuse what cannot be decoded, before anything is made.

    Raises:
        ValueError: an unknown shape or backend.
        NotImplementedError: a backend that this machine does not have.
    """
    for name, value, available in (
        ("shape", settings.shape, MODEL_SHAPES),
        ("backend", settings.backend, BACKENDS),
        ("host_work", settings.host_work, HOST_WORK),
    ):
        if value not in available:
            raise ValueError(f"unknown {name} {value!r}; available: {', '.join(available)}")
    if settings.device.type == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError(
            f"backend {settings.backend!r} needs a CUDA GPU, which torch does not find here; "
            "available: inline"
        )


def make_model(settings: PipelineSettings) -> Any:
    """The stock model, on its device."""
    shape = MODEL_SHAPES[settings.shape]
    # Made keys may reach further than the model's own positions: a step takes as long.
    shape = replace(shape, max_context=max(shape.max_context, settings.kv_len))
    return random_model(shape, device=settings.device, dtype=settings.dtype, seed=settings.seed)


def make_cache(
    settings: PipelineSettings,
    stock: Any,
    policies: Sequence[Policy],
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> ModelCache:
    """Caches for sessions of any of `policies`."""
    with closing(WorkerPool(settings.worker_threads)) as pool:  # decoders have their own
        return structured_model_cache(
            MODEL_SHAPES[settings.shape],
            kv_len=settings.kv_len,
            num_steps=settings.num_steps,
            rotary_emb=stock.model.rotary_emb,
            device=settings.device,
            dtype=settings.dtype,
            pool=pool,
            policies=policies,
            batch_size=settings.batch_size,
            distinct_layers=settings.distinct_layers,
            seed=settings.seed,
            on_layer=on_layer,
        )


def open_session(settings: PipelineSettings, stock: Any, cache: ModelCache) -> CacheSession:
    """A decoder for `settings` over a model and caches that may have served others before."""
    check_settings(settings)
    session = BACKENDS[settings.backend](settings, stock, cache)
    session.rewind()
    return session


class InlineSession(CacheSession):
    """Decode steps wholly on the CPU: layers and attention take turns, nothing overlaps.

    In its timelines the linear layers stand on the GPU's side. It runs operator by operator from
    Python, to mark each and to put structured keys in the place of the model's.
    """

    _decoder: NativeDecoder

    def __init__(self, settings: PipelineSettings, stock: Any, cache: ModelCache) -> None:
        lean = lean_model_maker(stock.config.model_type)(stock)
        super().__init__(
            NativeDecoder(lean, cache.store, settings.policy, settings.worker_threads), cache
        )
        self._attends = settings.host_work == "attend"
        self._weight_bytes = sum(weight.nbytes for weight in stock.parameters())

    def step(self) -> None:
        self._run(lambda kind, layer_idx=-1: None)

    def trace(self, num_steps: int) -> list[StepTimeline]:
        attention, num_workers = self._decoder.attention, self._decoder.pool.num_threads
        timelines = []
        attention.trace(True)
        try:
            for _ in range(num_steps):
                marks = GpuMarks(torch.device("cpu"))
                start = time.perf_counter_ns()
                self._run(marks.mark)
                end = time.perf_counter_ns()
                intervals = marks.read()
                cpu = [Interval(*i) for i in intervals if i.kind == "attend"]
                gpu = [i._replace(kind="wait") if i.kind == "attend" else i for i in intervals]
                events, num_lost = attention.trace_events()
                tasks = worker_tasks(events)
                timelines.append(
                    StepTimeline(start, end, tuple(cpu), tuple(gpu), tasks, num_workers, num_lost)
                )
        finally:
            attention.trace(False)
        return timelines

    def memory(self) -> dict[str, int]:
        return {"weights": self._weight_bytes, **super().memory()}

    @torch.inference_mode()
    def _run(self, mark: Callable[..., None]) -> None:
        """A step that calls `mark` as `GpuMarks.mark`."""
        cache, decoder, lean = self._cache, self._decoder, self._decoder.model
        mark(START)
        ones = [1] * self.batch_size
        cache.store.reserve(cache.seqs, ones)
        kv_lens = [cache.store.kv_len(seq) + 1 for seq in cache.seqs]
        step = decoder.attention.begin_step(cache.seqs, kv_lens)
        x: Tensor = lean.embed_tokens(self._tokens)
        positions = torch.from_numpy(step.positions)
        cos, sin = (t[0] for t in lean.rotary_emb(x, positions[None]))
        shape, pool = lean.shape, decoder.pool
        for layer_idx, layer in enumerate(decoder.stack.layers):
            qkv = layer.qkv(pool, x, norm=layer.input_norm)
            cache.rows.after_projection(layer_idx, 0, qkv, positions)
            decoder.attention.rope_append(layer_idx, step, qkv, (cos, sin))
            mark("linear", layer_idx)
            o = x.new_zeros(self.batch_size, shape.num_qo_heads * shape.head_dim)
            if self._attends:
                decoder.attention.attend(layer_idx, step, qkv, o)
            mark("attend", layer_idx)
            layer.o_proj(pool, o, out=x, residual=x)
            gate_up = layer.gate_up(pool, x, norm=layer.mlp_norm)
            layer.down(pool, gate_up, out=x, silu_mul=True, residual=x)
        self._tokens = decoder.logits(x).argmax(-1)
        cache.store.commit(cache.seqs, ones)
        mark("linear")


BACKENDS: dict[str, Callable[[PipelineSettings, Any, ModelCache], CacheSession]] = {
    "graph": DeviceSession,
    "stream": DeviceSession,
    "inline": InlineSession,
}
