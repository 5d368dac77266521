"""`SharedModel` of a model type without lean layers: one set of weights under several policies.

Windows and recurrent states are a part of what a prompt leaves behind, and each policy has a store
of its own: each reads the prompt by itself, and only one of them has it at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.decode.cpu import likeliest
from offload.loading.checkpoint import check_checkpoint
from offload.loading.names import resolve_folder
from offload.policies import Policy
from offload.runtime.config import RuntimeConfig
from offload.runtime.generic_cache import GenericCache
from offload.runtime.generic_loading import GenericRuntime, check_generic, load_generic
from offload.runtime.pooled_modules import use_pool
from offload.runtime.shared_model import ReadPrompt


class AnsweringRuntime(GenericRuntime):
    """What decodes one sequence under one policy, token by token, as evals call a `Runtime`."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def logits(self, cache: GenericCache, tokens: Sequence[int], *, reads_prompt: bool) -> Tensor:
        """Logits [vocab_size] behind the next tokens of the one row of a cache."""
        ids = torch.tensor([[*tokens]])
        given: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
        if "logits_to_keep" in self.runner.arguments:
            given["logits_to_keep"] = 1
        with self.runner.phase(reads_prompt=reads_prompt):
            out = self.run(partial(self.stock, **given), cache, ids.shape, None, ids)
        found: Tensor = out.logits[0, -1]
        return found

    def step_logits(self, cache: GenericCache, token: int, position: int) -> Tensor:
        """As `Runtime.step_logits`."""
        return self.logits(cache, [token], reads_prompt=False)

    def first_tokens(self, logits: Tensor) -> Tensor:
        """The likeliest of logits [1, vocab_size]."""
        return likeliest(logits)

    def choose_tokens(self, cache: GenericCache, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """The likeliest after one token [1] of one sequence, int64 [1]."""
        logits = self.step_logits(cache, int(tokens), int(position_ids))
        return likeliest(logits[None])


class GenericSharedModel:
    """A model that is loaded once, and a runtime for each policy, on a CPU.

    Args:
        name_or_path, policies, config: as `SharedModel` takes them.

    Attributes:
        runtimes: one per policy.

    Raises:
        As `OffloadedModel.from_pretrained`.
    """

    def __init__(
        self, name_or_path: str | Path, policies: Sequence[Policy], config: RuntimeConfig
    ) -> None:
        checkpoint = check_checkpoint(resolve_folder(name_or_path), takes_generic=True)
        first, *others = (config.under(policy) for policy in policies)
        for of_policy in others:
            check_generic(checkpoint, of_policy)
        opened: Any = load_generic(checkpoint, first, AnsweringRuntime)
        self.stock, specs = opened.stock, opened.hosted.specs
        self.runtimes: list[AnsweringRuntime] = [opened]
        for of_policy in others:
            made = AnsweringRuntime(self.stock, specs, of_policy, checkpoint.folder, opened.pool)
            made.hosted.others.take_sizes(opened.hosted.others)
            self.runtimes.append(made)
        use_pool(self.stock, opened.pool, lambda: any(each.decodes for each in self.runtimes))

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may have."""
        return self.runtimes[0].max_context

    @property
    def eos_tokens(self) -> set[int]:
        """With which the model ends an answer."""
        eos = self.stock.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos} - {None}

    @contextmanager
    def read(self, tokens: Sequence[int]) -> Iterator[ReadPrompt]:
        """Read a prompt under the first policy, for as long as that has not continued it.

        Raises:
            ValueError, HostBudgetError: it is too long.
        """
        runtime = self.runtimes[0]
        cache: Any = runtime.new_cache()
        runtime.check_context(len(tokens))
        start = time.perf_counter()
        try:
            logits = runtime.logits(cache, tokens, reads_prompt=True)[None]
            yield ReadPrompt(torch.tensor(tokens), cache, logits, time.perf_counter() - start)
        finally:
            cache.reset()

    @contextmanager
    def continued(self, index: int, prompt: ReadPrompt) -> Iterator[GenericCache]:
        """A cache with the prompt for `runtimes[index]`, which reads it again unless it is the
        first; gone afterwards."""
        runtime = self.runtimes[index]
        cache: Any = prompt.cache
        try:
            if index or not cache.kv_lens:
                cache.reset()
                self.runtimes[0].store.trim()
                cache = runtime.new_cache()
                runtime.logits(cache, prompt.tokens.tolist(), reads_prompt=True)
            yield cache
        finally:
            cache.reset()
            runtime.store.trim()
