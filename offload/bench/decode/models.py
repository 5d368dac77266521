"""What `offload bench decode` decodes: a shape with random weights, or a model on real text."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from offload.bench.pipeline.session import make_cache, make_model, open_session
from offload.bench.pipeline.settings import PipelineSettings
from offload.loading.checkpoint import check_checkpoint
from offload.loading.huge_pages import move_to_huge_pages
from offload.loading.names import load_tokenizer, resolve_folder
from offload.loading.stock_model import load_stock_model
from offload.measuring.steps.measure import DecodeSession
from offload.measuring.steps.text_session import TextSession
from offload.measuring.synthetic.model_cache import ModelCache
from offload.models import LeanModel, lean_model_maker
from offload.policies import Policy
from offload.runtime.config import runtime_config
from offload.runtime.opening import open_loaded, with_calibrated_policy
from offload.runtime.runtime import Runtime
from offload.system.errors import DeviceMemoryError

OnDone = Callable[[str, int, int], None]  # what is being made, how much of it is done, and in all
Opener = Callable[[Policy], DecodeSession]


def ignore(what: str, done: int, total: int) -> None:
    """An `OnDone` for nobody."""


class RandomModel:
    """A known shape with random weights; its prompts are made keys with real attention's structure.

    Args:
        settings: of everything; lengths, steps and the policy are replaced.
    """

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings, self.device = settings, settings.device

    @cached_property
    def stock(self) -> Any:
        with _room_for_weights(self.settings.shape):
            return make_model(self.settings)

    @cached_property
    def lean(self) -> LeanModel:
        """The model's lean view."""
        return lean_model(self.stock)

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """What opens a session of one of `policies` behind prompts of `kv_len` tokens."""
        with self.caches(kv_len, policies, num_steps=num_steps, on_done=on_done) as made:
            settings, cache = made
            yield lambda policy: open_session(replace(settings, policy=policy), self.stock, cache)

    @contextmanager
    def caches(
        self,
        kv_len: int,
        policies: Sequence[Policy],
        *,
        on_done: OnDone = ignore,
        **changes: Any,
    ) -> Iterator[tuple[PipelineSettings, ModelCache]]:
        """Made caches, and the settings to open sessions on them with.

        Args:
            changes: of other settings.
        """
        settings = replace(self.settings, kv_len=kv_len, policy=policies[0], **changes)
        cache = make_cache(
            settings,
            self.stock,
            policies,
            on_layer=lambda done, total: on_done("layers of keys", done, total),
        )
        synchronize(self.device)
        try:
            yield settings, cache
        finally:
            cache.close()
            release(self.device)


class TextModel:
    """A checkpoint that reads real text, and goes on reading it token by token.

    Args:
        name_or_path: what `OffloadedModel.from_pretrained` takes.
        policies: of the sessions; they learn from the model, on its device.
        text: default: docstrings of Python's standard library, about 100,000 tokens.
        options: `device`, `backend`, `dtype`, `num_threads` and `max_memory` of `RuntimeConfig`.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        policies: Sequence[Policy],
        *,
        text: str | None = None,
        **options: Any,
    ) -> None:
        from offload.system.stdlib_text import stdlib_paragraphs

        config = runtime_config(**options)
        self._folder = resolve_folder(name_or_path)
        self._checkpoint = check_checkpoint(self._folder)
        words = "\n\n".join(stdlib_paragraphs()) if text is None else text
        self._tokens = torch.tensor(load_tokenizer(self._folder)(words, verbose=False).input_ids)
        self.device = torch.device(config.device)
        for policy in policies:
            policy.check_model(**self._checkpoint.shape.heads)
        self.stock: Any = load_stock_model(self._checkpoint, config.dtype).eval()
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
        for name, most in (("the model has positions", limit), ("the text has", len(self._tokens))):
            if kv_len + num_steps > most:
                raise ValueError(
                    f"a context of {kv_len} tokens and {num_steps} steps are more than {name}: "
                    f"{most}; lower --context or --steps"
                    + ("" if name.endswith("positions") else ", or give a longer --text")
                )

        weight_bytes = sum(weight.nbytes for weight in self.stock.parameters())

        def opened(policy: Policy) -> DecodeSession:
            on_done(f"{policy.name} reads the text", 0, 1)
            session = TextSession(
                self._runtime(policy), weight_bytes, self._tokens, kv_len, num_steps
            )
            on_done(f"{policy.name} reads the text", 1, 1)
            return session

        try:
            yield opened
        finally:
            release(self.device)

    def _runtime(self, policy: Policy) -> Runtime:
        return Runtime(open_loaded(self.stock, self._configs[policy], self._folder))


DecodeModel = RandomModel | TextModel  # weights that every engine of one run shares


@contextmanager
def _room_for_weights(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"the GPU has no room for the weights of {name}; choose a smaller model"
        ) from error


def lean_model(stock: Any) -> LeanModel:
    """The lean view of a stock model."""
    return lean_model_maker(stock.config.model_type)(stock)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what is no longer used: the next engine may need all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
