"""Decode steps of a runtime behind prompts, as a generation makes them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.measuring.steps.step_timeline import StepTimeline
from offload.measuring.steps.traced_steps import traced_steps
from offload.measuring.synthetic.model_cache import ModelCache
from offload.models.batch import pack
from offload.runtime.cache import OffloadedCache
from offload.runtime.runtime import Runtime
from offload.system.torch_threads import torch_threads


class DecodeSession:
    """A runtime, prompts in its cache, and the steps after them.

    Steps are fed the same tokens whatever was chosen: every policy reads the same. Each repeat
    continues a fork of the prompts, whose pages and policy state stay as they were.

    Args:
        runtime: of one policy.
        prompt: sequences of one length; goes with the session.
        tokens: int64 [kv_len + num_steps or more], which each sequence is fed from kv_len on.
        num_steps: at most, of a repeat.
        weight_bytes: of the model's weights.
        on_close: what else ends with the session.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: OffloadedCache,
        tokens: Tensor,
        num_steps: int,
        *,
        weight_bytes: int,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.runtime, self.num_steps, self.batch_size = runtime, num_steps, prompt.batch_size
        self._prompt, self._tokens = prompt, tokens
        self._cache: OffloadedCache | None = None
        self._position = self._kv_len = prompt.seen_lens[0]
        self._weight_bytes, self._on_close = weight_bytes, on_close
        self._before_bytes = allocated_bytes(runtime.device)
        if runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(runtime.device)  # prefill took more

    @property
    def decoder(self) -> Any:
        """The runtime's."""
        return self.runtime.decoder

    def decode(self, num_steps: int) -> list[float]:
        """Decode so many tokens of every sequence; seconds of each step."""
        seconds: list[float] = []
        with torch_threads(1):  # as `Runtime.generation` does it, between forward passes too
            while len(seconds) < num_steps:
                start = time.perf_counter()
                count = self.step(num_steps - len(seconds))
                seconds += [(time.perf_counter() - start) / count] * count
        return seconds

    @torch.no_grad()
    def step(self, most: int = 1) -> int:
        """From the next token to the most likely one after it, on the host; as a generation does,
        as many as come at once, up to `most`: how many. All but the first of these feed themselves.
        """
        assert self._cache is not None
        positions = torch.full((self.batch_size,), self._position)
        tokens = self._tokens[self._position].repeat(self.batch_size)
        chosen = self.runtime.choose_tokens(self._cache, tokens, positions, most)
        self._position += chosen.shape[1]
        return int(chosen.shape[1])

    def trace(self, num_steps: int) -> list[StepTimeline]:
        """`decode` with marks, each step on its own; one more is decoded, to capture it."""
        return traced_steps(self.step, self.decoder, num_steps)

    def rewind(self) -> None:
        """Back to the prompts; what the policy keeps is as it was there."""
        if self._cache is not None:
            self._cache.reset()
        self._cache, self._position = copy.deepcopy(self._prompt), self._kv_len

    def memory(self) -> dict[str, int]:
        """Bytes, by what they are for."""
        runtime, device = self.runtime, self.runtime.device
        found = {
            "weights": self._weight_bytes,
            "kv_host": runtime.store.host_bytes_used,
            "policy_host": runtime.attention.states.num_bytes,
        }
        if device.type == "cuda":
            found["kv_device"] = self.decoder.device_bytes
            found["device"] = torch.cuda.max_memory_allocated(device) - self._before_bytes
        return found

    def close(self) -> None:
        """Give back what the session has."""
        for cache in (self._cache, self._prompt):
            if cache is not None:
                cache.reset()
        self._on_close()


class SyntheticSession(DecodeSession):
    """One over synthetic caches, which stay when it is closed; its decoder does not.

    Args:
        runtime: over the store of `synthetic`.
        before_bytes: of the GPU, before there was a runtime.
    """

    def __init__(
        self, runtime: Runtime, synthetic: ModelCache, *, weight_bytes: int, before_bytes: int
    ) -> None:
        prompt = OffloadedCache(runtime.sequences)
        prompt.take(*(runtime.store.fork(seq) for seq in synthetic.seqs))
        num_steps = synthetic.num_steps
        tokens = torch.zeros(synthetic.kv_len + num_steps, dtype=torch.int64)
        super().__init__(runtime, prompt, tokens, num_steps, weight_bytes=weight_bytes)
        self._on_close, self._synthetic = self.decoder.close, synthetic
        self._before_bytes = before_bytes
        if runtime.config.policy.selects:  # what attends to all tokens does so whatever is asked
            self.decoder.after_projection = synthetic.rows.after_projection

    def rewind(self) -> None:
        super().rewind()
        assert self._cache is not None
        self._synthetic.install(self.runtime.attention, self._cache.seqs)
        self.decoder.begin_generation(self.batch_size, self._kv_len + self.num_steps)


def text_session(
    runtime: Runtime, tokens: Tensor, kv_len: int, num_steps: int, *, weight_bytes: int
) -> DecodeSession:
    """One behind the first `kv_len` of `tokens`, which `runtime` reads; it is closed in the end."""
    prompt, ids = OffloadedCache(runtime.sequences), tokens[:kv_len]
    try:
        with torch.no_grad():
            embeddings = runtime.lean.embed_tokens(ids.to(runtime.device))
            batch = pack((1, kv_len), None, torch.arange(kv_len)[None])
            runtime.run(embeddings, batch, prompt, ids)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
    except BaseException:
        runtime.close()
        raise
    return DecodeSession(
        runtime, prompt, tokens, num_steps, weight_bytes=weight_bytes, on_close=runtime.close
    )


def allocated_bytes(device: torch.device) -> int:
    """That tensors on a GPU take now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
