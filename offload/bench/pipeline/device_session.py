"""Steps of the GPU pipeline over made caches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from cpu_ops.step_rows import DecodeStep
from offload.bench.pipeline.settings import PipelineSettings
from offload.decode.decoder import Decoder
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.handshake import NUM_LANES, Beside, SideStream, Step, make_handshake
from offload.decode.sampling import SamplingOptions
from offload.measuring.steps.measure import DecodeSession
from offload.measuring.steps.step_timeline import StepTimeline
from offload.measuring.steps.traced_steps import traced_steps
from offload.measuring.synthetic.model_cache import ModelCache
from offload.models import lean_model_maker
from offload.runtime.budgets import device_kv_budget_bytes, weight_bytes_of
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


class DeviceSession(CacheSession):
    """A session of the decoder that a model with a GPU has."""

    _decoder: DeviceDecoder

    def __init__(self, settings: PipelineSettings, stock: Any, cache: ModelCache) -> None:
        lean = lean_model_maker(stock.config.model_type)(stock)
        self._before_bytes = torch.cuda.memory_allocated(settings.device)
        self._without_host = settings.host_work == "none"
        config = RuntimeConfig(
            policy=settings.policy,
            device=str(settings.device),
            max_memory={} if settings.device_bytes is None else {0: settings.device_bytes},
        )
        self._weight_bytes = weight_bytes_of(stock)
        self._as_shipped, choose = settings.as_shipped, None
        if settings.as_shipped and settings.placement is None:
            choose = Chooser.of(config, lean.shape, stock.dtype, settings.worker_threads)
        decoder = DeviceDecoder(
            lean,
            cache.store,
            settings.policy,
            device=settings.device,
            backend=settings.backend,
            num_threads=settings.worker_threads,
            device_budget_bytes=device_kv_budget_bytes(config, self._weight_bytes),
            placement=settings.placement,
            choose=choose,
            num_parts=settings.num_parts,
            make_handshake=_without_host if self._without_host else make_handshake,
        )
        super().__init__(decoder, cache)
        decoder.after_projection = cache.rows.after_projection
        self._device = settings.device
        # Making the caches took more than decoding does.
        torch.cuda.reset_peak_memory_stats(settings.device)

    def rewind(self) -> None:
        super().rewind()
        if self._as_shipped:
            longest = max(self._cache.store.kv_len(seq) for seq in self._cache.seqs)
            self._decoder.begin_generation(self.batch_size, longest + self.num_steps)

    @torch.inference_mode()
    def step(self) -> None:
        cache, ones = self._cache, [1] * self.batch_size
        cache.store.reserve(cache.seqs, ones)
        positions = torch.tensor([cache.store.kv_len(seq) for seq in cache.seqs])
        self._tokens = self._decoder.choose_tokens(
            cache.seqs, self._tokens, positions, SamplingOptions()
        )
        cache.store.commit(cache.seqs, ones)

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
        return {
            "weights": self._weight_bytes,
            "kv_host": held["kv_host"],
            "kv_device": self._decoder.device_bytes,
            "device": peak,
            "policy_host": held["policy_host"],
        }


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
