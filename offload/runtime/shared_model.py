"""One model under several policies, which differ in decoding only: a prompt is read once for all.

Weights and KV store are shared. Prefill is exact attention whatever the policy, so that what it
leaves behind is the same for all: each policy continues a fork of the prompt's sequence, which
shares the prompt's pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from offload.loading.checkpoint import check_checkpoint
from offload.loading.names import HubOptions, resolve_folder
from offload.models.batch import RaggedBatch, pack
from offload.policies import Policy
from offload.policies.base import SparsePolicy
from offload.runtime.cache import OffloadedCache
from offload.runtime.config import RuntimeConfig
from offload.runtime.opening import (
    check_before_loading,
    open_loaded,
    open_model,
    with_calibrated_policy,
)
from offload.runtime.runtime import Runtime
from offload.runtime.stats import OffloadStats

_KEPT_QUERIES = 64  # more than a policy observes


@dataclass(frozen=True)
class _Reading(SparsePolicy):
    """Of the runtime that reads prompts: keeps the queries that some policy wants to see."""

    name: ClassVar[str] = "reading"
    observed_queries: ClassVar[int] = _KEPT_QUERIES
    dense_layers: int = 0


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """What all policies continue.

    Attributes:
        tokens: int64 [num_tokens], and as a batch.
        cache: with these tokens, of the runtime that has read them.
        logits: [1, vocab_size], of the token after them.
        seconds: that reading took.
    """

    tokens: Tensor
    batch: RaggedBatch
    cache: OffloadedCache
    logits: Tensor
    seconds: float


class SharedModel:
    """A model that is loaded once, and a runtime for each policy.

    Args:
        name_or_path: as `OffloadedModel.from_pretrained` takes it.
        policies: of the runtimes, in order; `config.policy` is not used.

    Attributes:
        runtimes: one per policy; their policies have learned what they need.

    Raises:
        As `OffloadedModel.from_pretrained`.
    """

    def __init__(
        self, name_or_path: str | Path, policies: Sequence[Policy], config: RuntimeConfig
    ) -> None:
        folder = resolve_folder(name_or_path)
        checkpoint = check_checkpoint(folder)
        for policy in policies:
            check_before_loading(checkpoint, replace(config, policy=policy), None)
        reading = _Reading(budget_tokens=checkpoint.shape.max_context)
        opened = open_model(folder, replace(config, policy=reading), HubOptions(), None)
        self._reader = Runtime(opened)
        self.runtimes = []
        for policy in policies:
            own = with_calibrated_policy(opened.stock, replace(config, policy=policy), folder)
            of_policy = replace(open_loaded(opened.stock, own, folder), lean=opened.lean)
            self.runtimes.append(Runtime(of_policy, self._reader.store))
        states = [x.attention.states for x in (self._reader, *self.runtimes)]
        self._reader.store.share_budget(lambda: sum(x.held_bytes for x in states))
        self.stock = opened.stock

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may have."""
        return self._reader.lean.shape.max_context

    @property
    def eos_tokens(self) -> set[int]:
        """With which the model ends an answer."""
        eos = self.stock.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos} - {None}

    @contextmanager
    def read(self, tokens: Sequence[int]) -> Iterator[ReadPrompt]:
        """Prefill a prompt; afterwards its memory is free.

        Raises:
            ValueError, HostBudgetError: it is too long.
        """
        runtime, ids = self._reader, torch.tensor(tokens)
        runtime.check_context(len(ids))
        cache = OffloadedCache(runtime.sequences)
        batch = pack((1, len(ids)), None, torch.arange(len(ids))[None])
        with torch.inference_mode(False), torch.no_grad():
            runtime.stats = OffloadStats()
            embedded = runtime.lean.embed_tokens(ids.to(runtime.device))
            hidden, phase = runtime.run(embedded, batch, cache, ids)
            logits = runtime.logits(hidden[-1:], phase)
        try:
            yield ReadPrompt(ids, batch, cache, logits, runtime.stats.prefill_seconds)
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
            for layer_idx, queries in self._reader.attention.states.queries_of(parent).items():
                runtime.attention.record_queries(child, layer_idx, queries, len(prompt.tokens))
            runtime.mark_text(prompt.batch, [child], prompt.tokens)
            yield cache
        finally:
            cache.reset()
