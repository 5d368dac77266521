"""Steps of the GPU pipeline over made caches, timed from outside and traced from inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from cpu_ops.step_rows import DecodeStep
from cpu_ops.trace import TraceEvent
from offload.bench.made.model_cache import ModelCache
from offload.bench.pipeline.gpu_marks import START, GpuMarks
from offload.bench.pipeline.measure import DecodeSession
from offload.bench.pipeline.settings import PipelineSettings
from offload.bench.pipeline.step_timeline import Interval, StepTimeline, clock_offset_ns, shifted
from offload.bench.pipeline.worker_tasks import worker_tasks
from offload.decode.decoder import Decoder
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.handshake import NUM_LANES, Beside, SideStream, Step, make_handshake
from offload.decode.sampling import SamplingOptions
from offload.models import lean_model_maker
from offload.runtime.config import RuntimeConfig
from offload.runtime.placing import Chooser


class CacheSession(DecodeSession):
    """One over made caches, which stay when it is closed; the decoder does not."""

    def __init__(self, decoder: Decoder, cache: ModelCache) -> None:
        self._decoder, self._cache = decoder, cache
        self.num_steps, self.batch_size = cache.num_steps, len(cache.seqs)
        self._tokens = torch.zeros(self.batch_size, dtype=torch.int64)

    def rewind(self) -> None:
        for seq in self._cache.seqs:
            self._decoder.forget(seq)
        self._cache.rewind()
        self._cache.install(self._decoder.attention)

    def memory(self) -> dict[str, int]:
        return {
            "kv_host": self._cache.store.host_bytes_used,
            "policy_host": self._decoder.attention.states.num_bytes,
        }

    def close(self) -> None:
        self._decoder.close()


class DecoderSession(CacheSession):
    """A session of a decoder with a device."""

    _decoder: DeviceDecoder

    def __init__(self, decoder: DeviceDecoder, cache: ModelCache) -> None:
        super().__init__(decoder, cache)
        decoder.after_projection = cache.rows.after_projection

    def memory(self) -> dict[str, int]:
        held = super().memory()
        return {"kv_host": held["kv_host"], "kv_device": self._decoder.device_bytes, **held}

    @torch.inference_mode()
    def step(self) -> None:
        cache, ones = self._cache, [1] * self.batch_size
        cache.store.reserve(cache.seqs, ones)
        positions = torch.tensor([cache.store.kv_len(seq) for seq in cache.seqs])
        self._tokens = self._decoder.choose_tokens(
            cache.seqs, self._tokens, positions, SamplingOptions()
        )
        cache.store.commit(cache.seqs, ones)


class DeviceSession(DecoderSession):
    """A session of the decoder that a model with a GPU has."""

    def __init__(self, settings: PipelineSettings, stock: Any, cache: ModelCache) -> None:
        lean = lean_model_maker(stock.config.model_type)(stock)
        self._before_bytes = torch.cuda.memory_allocated(settings.device)
        self._without_host = settings.host_work == "none"
        self._as_shipped, choose = settings.as_shipped, None
        if settings.as_shipped and settings.placement is None:
            choose = Chooser.of(
                RuntimeConfig(policy=settings.policy, device=str(settings.device)),
                lean.shape,
                stock.dtype,
                settings.worker_threads,
            )
        decoder = DeviceDecoder(
            lean,
            cache.store,
            settings.policy,
            device=settings.device,
            backend=settings.backend,
            num_threads=settings.worker_threads,
            placement=settings.placement,
            choose=choose,
            num_parts=settings.num_parts,
            make_handshake=_without_host if self._without_host else make_handshake,
        )
        super().__init__(decoder, cache)
        self._device = settings.device
        self._weight_bytes = sum(weight.nbytes for weight in stock.parameters())
        # Making the caches took more than decoding does.
        torch.cuda.reset_peak_memory_stats(settings.device)

    def rewind(self) -> None:
        super().rewind()
        if self._as_shipped:
            longest = max(self._cache.store.kv_len(seq) for seq in self._cache.seqs)
            self._decoder.begin_generation(self.batch_size, longest + self.num_steps)

    @torch.inference_mode()
    def step_several(self, most: int) -> int:
        if not self._as_shipped:
            return super().step_several(most)
        cache = self._cache
        count = self._decoder.tokens_at_once(cache.seqs, most)
        cache.store.reserve(cache.seqs, [count] * self.batch_size)
        positions = torch.tensor([cache.store.kv_len(seq) for seq in cache.seqs])
        chosen = self._decoder.choose_several(
            cache.seqs, self._tokens, positions, SamplingOptions(), count
        )
        self._tokens = chosen[:, -1].contiguous()
        cache.store.commit(cache.seqs, [count] * self.batch_size)
        return count

    def trace(self, num_steps: int) -> list[StepTimeline]:
        if self._without_host:
            raise ValueError("a step without the host has nothing to trace")
        return traced_steps(self.step, self._decoder, num_steps)

    def memory(self) -> dict[str, int]:
        peak = torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        held = super().memory()
        of_policy = held.pop("policy_host")
        return {"weights": self._weight_bytes, **held, "device": peak, "policy_host": of_policy}


def traced_steps(
    step: Callable[[], None], decoder: DeviceDecoder, num_steps: int
) -> list[StepTimeline]:
    """Steps with marks, each on its own; one more is decoded before, to capture it.

    Args:
        step: decodes one token with `decoder`.
    """
    marks = GpuMarks(decoder.device)

    def mark(kind: str, layer_idx: int) -> None:
        if kind == START:
            marks.clear()
        marks.mark(kind, layer_idx)

    decoder.on_mark = mark
    timelines = []
    try:
        step()
        attention, num_workers = decoder.attention, decoder.pool.num_threads
        attention.trace(True)
        for _ in range(num_steps):
            start = time.monotonic_ns()
            step()
            end = time.monotonic_ns()
            torch.cuda.synchronize(decoder.device)
            events, num_lost = attention.trace_events()
            timeline = timeline_of(start, end, marks.read(), events)
            timelines.append(replace(timeline, num_workers=num_workers, num_lost_events=num_lost))
        attention.trace(False)
    finally:
        decoder.on_mark = None
    return timelines


class WithoutHost:
    """In the place of a handshake: the graph alone, nobody is asked and nobody answers."""

    name = "graph"

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._side = [SideStream() for _ in range(NUM_LANES)]

    def publish(self, request: int) -> None:
        """Nobody is asked."""

    def await_reply(self, request: int) -> None:
        """Nobody answers."""

    def beside(self, lane: int = 0) -> AbstractContextManager[Beside]:
        return self._side[lane].beside()

    def join(self, work: Beside) -> None:
        SideStream.join(work)

    def prepare(self, key: Hashable, step: Step) -> bool:
        is_new = key not in self._graphs
        if is_new:
            step()
            torch.cuda.synchronize()
            self._graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[key]):
                step()
        return is_new

    def run(self, key: Hashable, step: Step, rows: DecodeStep, slots: Sequence[int]) -> None:
        self._graphs[key].replay()
        torch.cuda.synchronize()

    def close(self) -> None:
        self._graphs.clear()


def _without_host(*args: Any, **options: Any) -> WithoutHost:
    return WithoutHost()


def timeline_of(
    start: int, end: int, marks: Sequence[Interval], events: Sequence[TraceEvent]
) -> StepTimeline:
    """One step on the CPU's clock.

    A request rises after the GPU's mark before it and is seen when the CPU's wait ends; a reply is
    written after the CPU's attention ends and seen before the GPU's wait does. Where the GPU asks
    for nothing its first mark is taken for the start.
    """
    led = [e for e in events if e.worker < 0]
    seen = {e.layer_idx: e.end_ns for e in led if e.kind == "wait"}
    attended = {e.layer_idx: e.end_ns for e in led if e.kind == "attend"}
    raised = [
        (m.end_ns, seen[m.layer]) for m in marks if m.kind == "linear" and m.layer in attended
    ]
    answered = [(attended[m.layer], m.end_ns) for m in marks if m.kind == "wait"]
    if raised and answered:
        offset, _ = clock_offset_ns(raised, answered)
    else:
        offset = start - min(m.start_ns for m in marks)
    cpu = tuple(Interval(e.kind, e.layer_idx, e.start_ns, e.end_ns) for e in led)
    return StepTimeline(start, end, cpu, shifted(marks, offset), worker_tasks(events))
