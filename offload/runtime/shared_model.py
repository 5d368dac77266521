"""One model under several policies, which differ in decoding only: a prompt is read once for all.

Weights and KV store are shared. Prefill is exact attention whatever the policy, so that what it
leaves behind is the same for all: each policy continues a fork of the prompt's sequence, which
shares the prompt's pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from offload.loading.checkpoint import check_checkpoint
from offload.loading.names import resolve_folder
from offload.loading.stock_model import load_stock_model
from offload.models.batch import RaggedBatch, pack
from offload.policies import Policy
from offload.prefill.forward import prefill
from offload.runtime.cache import OffloadedCache
from offload.runtime.config import RuntimeConfig
from offload.runtime.opening import (
    check_before_loading,
    move_to_device,
    open_loaded,
    with_calibrated_policy,
)
from offload.runtime.runtime import Runtime
from offload.system.autocast import without_autocast
from offload.system.torch_threads import torch_threads

_KEPT_QUERIES = 64  # more than a policy observes


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """What all policies continue.

    Attributes:
        tokens: int64 [num_tokens], and as a batch.
        cache: with these tokens.
        queries: of each layer, [num_qo_heads, n, head_dim]: those of the last tokens.
        logits: [1, vocab_size], of the token after them.
        seconds: that reading took.
    """

    tokens: Tensor
    batch: RaggedBatch
    cache: OffloadedCache
    queries: dict[int, Tensor]
    logits: Tensor
    seconds: float


class SharedModel:
    """A model that is loaded once, and a runtime for each policy.

    Args:
        name_or_path: as `OffloadedModel.from_pretrained` takes it.
        policies: of the runtimes, in order.
        config: how it runs; the policy of it is not used.

    Attributes:
        runtimes: one per policy; their policies have learned what they need.
        reader: what reads prompts: the layers of the runtimes, or a copy of them elsewhere, such as
            on a GPU while the runtimes decode on the CPU.

    Raises:
        As `OffloadedModel.from_pretrained`.
    """

    def __init__(
        self, name_or_path: str | Path, policies: Sequence[Policy], config: RuntimeConfig
    ) -> None:
        folder = resolve_folder(name_or_path)
        checkpoint = check_checkpoint(folder)
        configs = [replace(config, policy=policy) for policy in policies]
        for of_policy in configs:
            check_before_loading(checkpoint, of_policy, None)
        self.stock = load_stock_model(checkpoint, config.dtype).eval()
        # On the CPU: calibration reads its text there.
        configs = [with_calibrated_policy(self.stock, of_policy, folder) for of_policy in configs]
        move_to_device(self.stock, config)
        opened = open_loaded(self.stock, configs[0], folder)
        self.runtimes = [Runtime(opened)]
        self.reader = opened.lean
        store = self.runtimes[0].store
        for of_policy in configs[1:]:
            other = replace(open_loaded(self.stock, of_policy, folder), lean=opened.lean)
            self.runtimes.append(Runtime(other, store))
        states = [runtime.attention.states for runtime in self.runtimes]
        store.share_budget(lambda: sum(of_policy.held_bytes for of_policy in states))

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may have."""
        return self.runtimes[0].lean.shape.max_context

    @property
    def eos_tokens(self) -> set[int]:
        """With which the model ends an answer."""
        eos = self.stock.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos} - {None}

    @contextmanager
    def read(self, tokens: Sequence[int]) -> Iterator[ReadPrompt]:
        """Prefill a prompt; afterwards its memory is free.

        Raises:
            ValueError, HostBudgetError, DeviceMemoryError: it is too long.
        """
        runtime, reader, ids = self.runtimes[0], self.reader, torch.tensor(tokens)
        runtime.check_context(len(ids))
        cache, queries = OffloadedCache(runtime.sequences), dict[int, Tensor]()
        batch = pack((1, len(ids)), None, torch.arange(len(ids))[None])

        def keep(seq: int, layer_idx: int, new: Tensor, kv_len: int) -> None:
            new = new.to(runtime.device)
            kept = torch.cat([queries.get(layer_idx, new[:, :0]), new], dim=1)
            queries[layer_idx] = kept[:, -_KEPT_QUERIES:].clone()

        start = time.perf_counter()
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                runtime._current_device(),
                without_autocast(runtime.device),
                torch_threads(runtime.config.num_threads),
            ):
                hidden = prefill(
                    reader,
                    reader.embed_tokens(ids.to(reader.lm_head.weight.device)),
                    batch,
                    store=runtime.store,
                    seqs=cache.reserve(batch),
                    slice_tokens=runtime.config.prefill_slice_tokens,
                    on_queries=keep,
                    device_budget_bytes=runtime.config.max_memory.get(runtime.device.index or 0),
                )
                cache.commit(batch)
                logits = runtime.logits(hidden[-1:].to(runtime.device), "prefill")
            seconds = time.perf_counter() - start
            yield ReadPrompt(ids, batch, cache, queries, logits, seconds)
        finally:
            cache.reset()

    @contextmanager
    def continued(self, index: int, prompt: ReadPrompt) -> Iterator[OffloadedCache]:
        """A fork of the prompt for `runtimes[index]`, gone afterwards."""
        runtime, (parent,) = self.runtimes[index], prompt.cache.seqs
        cache = OffloadedCache(runtime.sequences)
        child = runtime.store.fork(parent)
        cache.take(child)
        try:
            for layer_idx, queries in prompt.queries.items():
                runtime.attention.record_queries(child, layer_idx, queries, len(prompt.tokens))
            runtime.mark_text(prompt.batch, [child], prompt.tokens)
            yield cache
        finally:
            cache.reset()
