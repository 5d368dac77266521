"""One model under several policies, which differ in decoding only: a prompt is read once for all.

Weights and KV store are shared. Prefill is exact attention whatever the policy, so that what it
leaves behind is the same for all: each policy continues a fork of the prompt's sequence, which
shares the prompt's pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.decode.gpu.placement import HeadPlacement, places_by_role
from offload.loading.checkpoint import check_checkpoint
from offload.loading.names import resolve_folder
from offload.loading.stock_model import load_stock_model
from offload.models import lean_model_maker
from offload.models.batch import pack
from offload.models.shape import ModelShape
from offload.policies import Policy
from offload.policies.full import Full
from offload.runtime.auto_policy import with_resolved_policy
from offload.runtime.cache import OffloadedCache
from offload.runtime.capping import with_cap_in_tokens
from offload.runtime.config import RuntimeConfig
from offload.runtime.model_loading import (
    check_before_loading,
    move_to_device,
    prepare_loaded,
    with_calibrated_policy,
)
from offload.runtime.runtime import Runtime
from offload.system.autocast import current_device, without_autocast


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """What all policies continue.

    Attributes:
        tokens: int64 [num_tokens].
        cache: with these tokens; every policy knows what it has to of its sequence.
        logits: [1, vocab_size], of the token after them.
        seconds: that reading took, with what policies build of a prompt on a GPU.
    """

    tokens: Tensor
    cache: OffloadedCache
    logits: Tensor
    seconds: float


class ContinuesPrompts(Protocol):
    """What decodes after a prompt: `SharedModel` and `BoundedModel`."""

    @property
    def runtimes(self) -> Sequence[Runtime]:
        """One per policy."""

    def continued(self, index: int, prompt: ReadPrompt) -> AbstractContextManager[OffloadedCache]:
        """A cache with the prompt for `runtimes[index]`, gone afterwards."""


class BoundedModel:
    """One runtime with a KV store of its own, which reads its own prompts: those of sequences that
    have host_bytes_per_sequence, or other rows.

    What is condensed of a prompt depends on the bound, so that no other bound can continue it.
    Weights are those of the `SharedModel` that it is from.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtimes: Sequence[Runtime] = (runtime,)

    @contextmanager
    def read(self, tokens: Sequence[int]) -> Iterator[ReadPrompt]:
        """As `SharedModel.read`, in slices where the prompt is longer than the bound."""
        (runtime,), ids = self.runtimes, torch.tensor(tokens)
        runtime.check_context(len(ids))
        cache = OffloadedCache(runtime.sequences)
        batch = pack((1, len(ids)), None, torch.arange(len(ids))[None])
        start = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.no_grad():
                embedded = runtime.lean.embed_tokens(ids.to(runtime.device))
                hidden, phase = runtime.run(embedded, batch, cache, ids)
                logits = runtime.runner.logits(hidden[-1:], phase)
            yield ReadPrompt(ids, cache, logits, time.perf_counter() - start)
        finally:
            cache.reset()

    @contextmanager
    def continued(self, index: int, prompt: ReadPrompt) -> Iterator[OffloadedCache]:
        """The prompt itself, which can be continued once."""
        yield prompt.cache

    def close(self) -> None:
        """Give its threads and the memory of its store back."""
        for runtime in self.runtimes:
            runtime.close()


class SharedModel:
    """A model that is loaded once, and a runtime for each policy. A GPU that decodes attends to no
    head that the policy has select, though there be room: what is compared is the policies.

    Args:
        name_or_path: as `OffloadedModel.from_pretrained` takes it.
        policies: of the runtimes, in order.
        config: how it runs; the policy of it is not used.
        reads_on: a device that reads the prompts, with weights of its own: a GPU, where `config`
            decodes on the CPU.
        hot_rows: of heads that select, where they may have some (`placement.Place`); not on a CPU
            without backend "inline".

    Attributes:
        runtimes: one per policy; their policies have learned what they need.
        reader: what reads prompts: the layers of the runtimes, or a copy of them elsewhere, such as
            on a GPU while the runtimes decode on the CPU.

    Raises:
        As `OffloadedModel.from_pretrained`.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        policies: Sequence[Policy],
        config: RuntimeConfig,
        *,
        reads_on: str | None = None,
        hot_rows: bool = False,
    ) -> None:
        if config.host_bytes_per_sequence is not None:
            raise ValueError(
                "host_bytes_per_sequence is for one policy: a prompt that is read once for several "
                "is kept whole; leave it out"
            )
        folder = resolve_folder(name_or_path)
        checkpoint = check_checkpoint(folder)
        configs = [
            with_resolved_policy(checkpoint, config.under(policy), None)[0] for policy in policies
        ]
        configs = [with_cap_in_tokens(checkpoint, of_policy, None) for of_policy in configs]
        for of_policy in configs:
            check_before_loading(checkpoint, of_policy, None)
        self.stock = load_stock_model(checkpoint, config.dtype, config.packing).eval()
        move_to_device(self.stock, config)
        configs = [with_calibrated_policy(self.stock, of_policy, folder) for of_policy in configs]
        # Of a checkpoint's the windows of its layers are not known.
        shape = lean_model_maker(self.stock.config.model_type, heads_may_differ=True)(
            self.stock
        ).shape
        configs = [_placed_by_role(each, shape, hot_rows=hot_rows) for each in configs]
        reader = None
        if reads_on is not None:
            host: dict[int | str, int] = {
                key: size for key, size in config.max_memory.items() if key == "cpu"
            }
            reading = replace(
                config,
                policy=Full(),
                device=reads_on,
                weights="auto",
                backend=None,
                max_memory=host,
                cache_correction_every=None,
            )
            stock = load_stock_model(checkpoint, config.dtype).eval()
            move_to_device(stock, reading)
            reader = Runtime(prepare_loaded(stock, reading, folder))
        opened = prepare_loaded(self.stock, configs[0], folder)
        self._opened = [opened]
        self.runtimes = [Runtime(opened, None if reader is None else reader.store)]
        store = self.runtimes[0].store
        for of_policy in configs[1:]:
            other = replace(prepare_loaded(self.stock, of_policy, folder), lean=opened.lean)
            self._opened.append(other)
            self.runtimes.append(Runtime(other, store))
        self._reader = reader or self.runtimes[0]

    @property
    def device(self) -> torch.device:
        """Where it decodes."""
        return self.runtimes[0].device

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may have."""
        return self.runtimes[0].lean.shape.max_context

    @property
    def eos_tokens(self) -> set[int]:
        """With which the model ends an answer."""
        eos = self.stock.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos} - {None}

    def bounded(self, index: int, num_bytes: int, **options: Any) -> BoundedModel:
        """As `runtimes[index]`, with at most `num_bytes` of host memory for a sequence.

        Args:
            options: condense_by and condensed_share of `RuntimeConfig`.

        Raises:
            ValueError: as `OffloadedModel.from_pretrained` with host_bytes_per_sequence.
        """
        opened = self._opened[index]
        config = replace(opened.config, host_bytes_per_sequence=num_bytes, **options)
        return BoundedModel(Runtime(replace(opened, config=config)))

    @contextmanager
    def unrounded(self) -> Iterator[BoundedModel]:
        """One runtime without a bound that attends to all, over keys and values in the model's
        dtype where those of this are int8; its memory is free afterwards."""
        self.runtimes[0].store.trim()  # both have the host's budget
        opened = self._opened[0]
        config = replace(opened.config, policy=Full(), kv_dtype="auto", cache_correction_every=None)
        model = BoundedModel(Runtime(replace(opened, config=config)))
        with closing(model):
            yield model

    @contextmanager
    def read(self, tokens: Sequence[int]) -> Iterator[ReadPrompt]:
        """Prefill a prompt; afterwards its memory is free.

        Raises:
            ValueError, HostBudgetError, DeviceMemoryError: it is too long.
        """
        reader, ids = self._reader, torch.tensor(tokens)
        reader.check_context(len(ids))
        cache = OffloadedCache(reader.sequences)
        batch = pack((1, len(ids)), None, torch.arange(len(ids))[None])
        attentions = [runtime.attention for runtime in self.runtimes]
        start = time.perf_counter()
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                current_device(reader.device),
                without_autocast(reader.device),
            ):
                this = cache.begin(batch)
                this.at_once = True
                this.reserve()
                (seq,) = this.seqs
                for runtime in self.runtimes:
                    runtime.sequences.note_text(batch, [seq], ids)
                embedded = reader.lean.embed_tokens(ids.to(reader.device))
                hidden = reader.runner.prefill(embedded, batch, [seq], attentions=attentions)
                this.commit()
                this.end()
                logits = reader.runner.logits(hidden[-1:], "prefill").to(self.device)
            seconds = time.perf_counter() - start
            yield ReadPrompt(ids, cache, logits, seconds)
        finally:
            for runtime in self.runtimes:
                for seq in cache.seqs:
                    runtime.attention.states.forget(seq)
            cache.reset()

    @contextmanager
    def continued(self, index: int, prompt: ReadPrompt) -> Iterator[OffloadedCache]:
        """A fork of the prompt for `runtimes[index]`, gone afterwards."""
        runtime, (parent,) = self.runtimes[index], prompt.cache.seqs
        cache = OffloadedCache(runtime.sequences)
        cache.take(runtime.sequences.fork(parent))
        try:
            yield cache
        finally:
            cache.reset()


def _placed_by_role(config: RuntimeConfig, shape: ModelShape, *, hot_rows: bool) -> RuntimeConfig:
    policy, decodes = config.policy, config.device != "cpu" or config.backend is not None
    if config.placement is not None or not decodes or not policy.selects:
        return config
    heads = shape.num_qo_heads, shape.num_kv_heads
    places = places_by_role(policy, shape.num_layers, *heads, shape.windows)
    placement = HeadPlacement(places)
    if hot_rows:
        placement = placement.with_hot_rows(policy, shape.num_qo_heads)
    return replace(config, placement=placement)
