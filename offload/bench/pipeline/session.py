"""What `offload bench pipeline` decodes with: a model of random weights over made caches.

A backend is a function from settings, model and caches to a `PipelineSession`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.bench.made.model_cache import ModelCache, structured_model_cache
from offload.bench.made.random_model import random_model
from offload.bench.pipeline.gpu_marks import START, GpuMarks
from offload.bench.pipeline.measure import PipelineSession
from offload.bench.pipeline.settings import PipelineSettings
from offload.bench.pipeline.step_timeline import Interval, StepTimeline
from offload.bench.pipeline.worker_tasks import worker_tasks
from offload.decode.cpu import NativeDecoder
from offload.models import lean_model_maker
from offload.models.shape import MODEL_SHAPES
from offload.policies import Policy

HOST_WORK = ("attend", "none")
Opener = Callable[[PipelineSettings, Any, ModelCache], PipelineSession]


@contextlib.contextmanager
def opened_session(
    settings: PipelineSettings, *, on_layer: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[PipelineSession]:
    """Model, caches and decoder, made for `settings` and given back afterwards.

    Args:
        on_layer: gets layers of the caches done and in all.

    Raises:
        ValueError: an unknown shape or backend, or numbers out of range.
        NotImplementedError: a backend that this machine does not have.
        HostBudgetError: caches that do not fit.
    """
    check_settings(settings)
    stock = make_model(settings)
    cache = make_cache(settings, stock, [settings.policy], on_layer=on_layer)
    try:
        session = open_session(settings, stock, cache)
        try:
            yield session
        finally:
            session.close()
    finally:
        cache.close()


def check_settings(settings: PipelineSettings) -> None:
    """Refuse what cannot be decoded, before anything is made."""
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
    return random_model(
        MODEL_SHAPES[settings.shape],
        device=settings.device,
        dtype=settings.dtype,
        seed=settings.seed,
    )


def make_cache(
    settings: PipelineSettings,
    stock: Any,
    policies: Sequence[Policy],
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> ModelCache:
    """Caches for sessions of any of `policies`."""
    pool = WorkerPool(settings.worker_threads)
    try:
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
    finally:
        pool.close()  # decoders have their own


def open_session(settings: PipelineSettings, stock: Any, cache: ModelCache) -> PipelineSession:
    """A decoder for `settings` over a model and caches that may have served others before."""
    check_settings(settings)
    session = BACKENDS[settings.backend](settings, stock, cache)
    session.rewind()
    return session


class InlineSession:
    """Decode steps wholly on the CPU: layers and attention take turns, nothing overlaps.

    In its timelines the linear layers stand on the GPU's side. It runs operator by operator from
    Python, to mark each and to put structured keys in the place of the model's.
    """

    def __init__(self, settings: PipelineSettings, stock: Any, cache: ModelCache) -> None:
        self._settings = settings
        self._cache = cache
        self._lean = lean = lean_model_maker(stock.config.model_type)(stock)
        self._decoder = NativeDecoder(lean, cache.store, settings.policy, settings.worker_threads)
        self._tokens = torch.zeros(len(cache.seqs), dtype=torch.int64)
        self._weights = sum(weight.nbytes for weight in stock.parameters())

    @property
    def num_steps(self) -> int:
        return self._cache.num_steps

    @property
    def batch_size(self) -> int:
        return len(self._cache.seqs)

    def decode(self, num_steps: int) -> list[float]:
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._step(None)
            seconds.append(time.perf_counter() - start)
        return seconds

    def trace(self, num_steps: int) -> list[StepTimeline]:
        attention, num_workers = self._decoder.attention, self._decoder.pool.num_threads
        timelines = []
        attention.trace(True)
        try:
            for _ in range(num_steps):
                marks = GpuMarks(torch.device("cpu"))
                start = time.perf_counter_ns()
                self._step(marks)
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

    def rewind(self) -> None:
        self._cache.rewind()
        self._cache.install(self._decoder.attention)

    def memory(self) -> dict[str, int]:
        return {
            "weights": self._weights,
            "kv_host": self._cache.store.host_bytes_used,
            "policy_host": self._decoder.attention.states.num_bytes,
        }

    def close(self) -> None:
        self._decoder.close()

    @torch.inference_mode()
    def _step(self, marks: GpuMarks | None) -> None:
        """One token of every sequence."""
        cache, decoder, lean = self._cache, self._decoder, self._lean
        if marks is not None:
            marks.mark(START)
        n = len(cache.seqs)
        cache.store.reserve(cache.seqs, [1] * n)
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
            if marks is not None:
                marks.mark("linear", layer_idx)
            o = x.new_zeros(n, shape.num_qo_heads * shape.head_dim)
            if self._settings.host_work == "attend":
                decoder.attention.attend(layer_idx, step, qkv, o)
            if marks is not None:
                marks.mark("attend", layer_idx)
            layer.o_proj(pool, o, out=x, residual=x)
            gate_up = layer.gate_up(pool, x, norm=layer.mlp_norm)
            layer.down(pool, gate_up, out=x, silu_mul=True, residual=x)
        self._tokens = decoder.logits(x).argmax(-1)
        cache.store.commit(cache.seqs, [1] * n)
        if marks is not None:
            marks.mark("linear")


def _device_session(settings: PipelineSettings, stock: Any, cache: ModelCache) -> PipelineSession:
    from offload.bench.pipeline.device_session import DeviceSession

    return DeviceSession(settings, stock, cache)


BACKENDS: dict[str, Opener] = {
    "graph": _device_session,
    "stream": _device_session,
    "inline": InlineSession,
}
