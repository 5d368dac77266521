"""What `offload bench decode` decodes: a shape with random weights, or a model on real text."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cpu_ops.packed import FORMATS
from cpu_ops.worker_pool import WorkerPool
from offload.loading.checkpoint import check_checkpoint
from offload.loading.huge_pages import move_to_huge_pages
from offload.loading.names import load_tokenizer, resolve_folder
from offload.loading.packing import pack_weights
from offload.loading.stock_model import load_stock_model
from offload.measuring.steps.session import (
    DecodeSession,
    SyntheticSession,
    allocated_bytes,
    text_session,
)
from offload.measuring.synthetic.model_cache import structured_model_cache
from offload.measuring.synthetic.random_model import random_model
from offload.models import LeanModel, lean_model_maker
from offload.models.base import check_alike
from offload.models.shape import MODEL_SHAPES
from offload.policies import Policy
from offload.runtime.budgets import pool_threads, weight_bytes_of
from offload.runtime.config import RuntimeConfig
from offload.runtime.model_loading import prepare_loaded, with_calibrated_policy
from offload.runtime.runtime import Runtime
from offload.system.errors import DeviceMemoryError

OnDone = Callable[[str, int, int], None]  # what is being made, how much of it is done, and in all
Opener = Callable[..., DecodeSession]  # of a policy, and other options of `RuntimeConfig`


def ignore(what: str, done: int, total: int) -> None:
    """An `OnDone` that does nothing."""


class RandomModel:
    """A known shape with random weights; its prompts are synthetic keys with real attention's
    structure.

    Args:
        shape: a name of `MODEL_SHAPES`.
        config: how it runs; the policy is replaced. Heads are placed as a model's own.
        longest: tokens of the longest prompt.
        batch_size: sequences that decode together.
        distinct_layers: see `structured_model_cache`.
        num_layers: of the shape's, where all would take more memory than there is.
        seed: of weights, keys and queries.
    """

    def __init__(
        self,
        shape: str,
        config: RuntimeConfig,
        *,
        longest: int,
        batch_size: int = 1,
        distinct_layers: int | None = None,
        num_layers: int | None = None,
        seed: int = 0,
    ) -> None:
        self.shape, self.config, self.device = shape, config, torch.device(config.device)
        self.dtype = config.dtype or torch.bfloat16
        self.batch_size, self._distinct_layers = batch_size, distinct_layers
        self._longest, self._seed = longest, seed
        most = MODEL_SHAPES[shape].num_layers
        if num_layers is not None and not 1 <= num_layers <= most:
            raise ValueError(f"num_layers must be in [1, {most}], got {num_layers}")
        self._made = replace(MODEL_SHAPES[shape], num_layers=num_layers or most)

    @cached_property
    def stock(self) -> Any:
        # Synthetic keys may reach further than the model's own positions: a step takes as long.
        longest = max(self._made.max_context, self._longest)
        shape = replace(self._made, max_context=longest)
        with _room_for_weights(self.shape):
            made = random_model(shape, device=self.device, dtype=self.dtype, seed=self._seed)
            if self.config.weights in FORMATS:
                pack_weights(made, self.config.weights)
            return made

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """What opens a session of one of `policies` behind prompts of `kv_len` tokens.

        Raises:
            HostBudgetError: caches that do not fit.
        """
        with closing(WorkerPool(pool_threads(self.config))) as pool:  # decoders have their own
            cache = structured_model_cache(
                self._made,
                kv_len=kv_len,
                num_steps=num_steps,
                rotary_emb=self.stock.model.rotary_emb,
                device=self.device,
                dtype=self.dtype,
                kv_dtype=self.config.kv_dtype,
                pool=pool,
                policies=policies,
                batch_size=self.batch_size,
                distinct_layers=self._distinct_layers,
                seed=self._seed,
                on_layer=lambda done, total: on_done("layers of keys", done, total),
            )
        synchronize(self.device)

        def opened(policy: Policy, **options: Any) -> DecodeSession:
            config = replace(self.config, policy=policy, **options)
            before_bytes = allocated_bytes(self.device)
            runtime = Runtime(prepare_loaded(self.stock, config, None), cache.store)
            weight_bytes = weight_bytes_of(self.stock)
            return SyntheticSession(
                runtime, cache, weight_bytes=weight_bytes, before_bytes=before_bytes
            )

        try:
            yield opened
        finally:
            cache.close()
            release(self.device)


class TextModel:
    """A checkpoint that reads real text, and goes on reading it token by token.

    Attributes:
        batch_size: one: a text is one sequence.

    Args:
        name_or_path: what `OffloadedModel.from_pretrained` takes.
        policies: of the sessions; they learn from the model, on its device.
        config: how it runs; the policy is replaced.
        text: what it reads.
    """

    batch_size = 1

    def __init__(
        self,
        name_or_path: str | Path,
        policies: Sequence[Policy],
        config: RuntimeConfig,
        *,
        text: str,
    ) -> None:
        self._folder = resolve_folder(name_or_path)
        self._checkpoint = check_checkpoint(self._folder)
        self._tokens = torch.tensor(load_tokenizer(self._folder)(text, verbose=False).input_ids)
        self.device = torch.device(config.device)
        for policy in policies:
            policy.check_model(**self._checkpoint.shape.heads)
        self.stock: Any = load_stock_model(self._checkpoint, config.dtype, config.packing).eval()
        if self.device.type == "cpu":
            move_to_huge_pages(self.stock)
        else:
            with _room_for_weights(str(name_or_path)):
                self.stock.to(self.device)
        self._configs = {
            policy: with_calibrated_policy(self.stock, replace(config, policy=policy), self._folder)
            for policy in policies
        }

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """As `RandomModel.sessions`; each session reads the prompt anew.

        Raises:
            ValueError: more tokens than the model has positions, or the text has.
        """
        limit = lean_model(self.stock).shape.max_context
        check_length(kv_len, num_steps, limit, len(self._tokens))
        weight_bytes = weight_bytes_of(self.stock)

        def opened(policy: Policy) -> DecodeSession:
            on_done(f"{policy.name} reads the text", 0, 1)
            runtime = Runtime(prepare_loaded(self.stock, self._configs[policy], self._folder))
            session = text_session(
                runtime, self._tokens, kv_len, num_steps, weight_bytes=weight_bytes
            )
            on_done(f"{policy.name} reads the text", 1, 1)
            return session

        try:
            yield opened
        finally:
            release(self.device)


DecodeModel = RandomModel | TextModel  # weights that every engine of one run shares


def check_length(kv_len: int, num_steps: int, positions: int, text_tokens: int) -> None:
    """Refuse more tokens than the model has positions, or the text has."""
    for name, most in (("the model has positions", positions), ("the text has", text_tokens)):
        if kv_len + num_steps > most:
            raise ValueError(
                f"a context of {kv_len} tokens and {num_steps} steps are more than {name}: "
                f"{most}; lower --context or --steps"
                + ", or give a longer --text"
                * (name == "the text has")
            )


@contextmanager
def _room_for_weights(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"the GPU has no room for the weights of {name}; choose a smaller model"
        ) from error


def lean_model(stock: Any) -> LeanModel:
    """The lean view of a stock model, for engines that attend to all tokens in layers alike.

    Raises:
        NotImplementedError: a layer has a window, or other heads than the first.
    """
    lean = lean_model_maker(stock.config.model_type, heads_may_differ=True)(stock)
    check_alike([layer.spec for layer in lean.layers], "the graph of all on the GPU")
    if lean.shape.windows:
        raise NotImplementedError("layers with a window are not for the graph of all on the GPU")
    return lean


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what is no longer used: the next engine may need all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
