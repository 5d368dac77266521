"""Decode steps of a runtime that reads a text, as a generation makes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from offload.decode.sampling import SamplingOptions
from offload.measuring.steps.measure import DecodeSession
from offload.measuring.steps.step_timeline import StepTimeline
from offload.measuring.steps.traced_steps import traced_steps
from offload.models.batch import pack
from offload.runtime.cache import OffloadedCache
from offload.runtime.runtime import Runtime
from offload.system.torch_threads import torch_threads


class TextSession(DecodeSession):
    """One that is fed the text's own tokens: every policy reads the same.

    Each repeat continues a fork of the prompt, whose pages and policy state stay as they were.

    Args:
        runtime: of one policy; closed with the session.
        weight_bytes: of the model's weights.
        tokens: int64 [kv_len + num_steps or more], the text.
    """

    batch_size = 1

    def __init__(
        self, runtime: Runtime, weight_bytes: int, tokens: Tensor, kv_len: int, num_steps: int
    ) -> None:
        self.num_steps = num_steps
        self._runtime: Any = runtime
        self._tokens, self._position = tokens, kv_len
        self._kv_len, self._weight_bytes = kv_len, weight_bytes
        self._prompt = OffloadedCache(runtime.sequences)
        self._cache: OffloadedCache | None = None
        try:
            self._read(tokens[:kv_len])
        except BaseException:
            self.close()
            raise
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
            self._before_bytes = torch.cuda.memory_allocated(runtime.device)
            torch.cuda.reset_peak_memory_stats(runtime.device)  # prefill took more

    def decode(self, num_steps: int) -> list[float]:
        with torch_threads(1):  # as `Runtime.generation` does it, between forward passes too
            return super().decode(num_steps)

    @property
    def decoder(self) -> Any:
        """The runtime's."""
        return self._runtime._decoder

    def trace(self, num_steps: int) -> list[StepTimeline]:
        if self._runtime.device.type == "cpu":
            return super().trace(num_steps)
        return traced_steps(self.step, self.decoder, num_steps)

    def rewind(self) -> None:
        if self._cache is not None:
            self._cache.reset()
        self._cache, self._position = copy.deepcopy(self._prompt), self._kv_len

    def memory(self) -> dict[str, int]:
        runtime, device = self._runtime, self._runtime.device
        found = {
            "weights": self._weight_bytes,
            "kv_host": runtime.store.host_bytes_used,
            "policy_host": runtime.attention.states.num_bytes,
        }
        if device.type == "cuda":
            found["kv_device"] = runtime._decoder.device_bytes
            found["device"] = torch.cuda.max_memory_allocated(device) - self._before_bytes
        return found

    def close(self) -> None:
        for cache in (self._cache, self._prompt):
            if cache is not None:
                cache.reset()
        self._runtime._decoder.close()
        self._runtime.store.close()

    def step(self) -> None:
        """From the next token of the text to the most likely one after it, on the host."""
        self.step_several(1)

    @torch.no_grad()
    def step_several(self, most: int) -> int:
        """As a generation does; where several come at once, all but the first are chosen ones."""
        assert self._cache is not None
        positions = torch.tensor([self._position])
        tokens = self._tokens[self._position : self._position + 1]
        chosen = self._runtime.choose_tokens(
            self._cache, tokens, positions, SamplingOptions(), most
        )
        self._position += chosen.shape[1]
        return int(chosen.shape[1])

    @torch.no_grad()
    def _read(self, prompt: Tensor) -> None:
        batch = pack((1, len(prompt)), None, torch.arange(len(prompt))[None])
        embeddings = self._runtime.lean.embed_tokens(prompt.to(self._runtime.device))
        self._runtime.run(embeddings, batch, self._prompt, prompt)
