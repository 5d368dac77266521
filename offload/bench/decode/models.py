"""What `offload bench decode` decodes: a shape with random weights, or a model on real text."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.bench.made.model_cache import ModelCache
from offload.bench.pipeline.device_session import traced_steps
from offload.bench.pipeline.measure import DecodeSession
from offload.bench.pipeline.session import make_cache, make_model, open_session
from offload.bench.pipeline.settings import PipelineSettings
from offload.bench.pipeline.step_timeline import StepTimeline
from offload.decode.sampling import SamplingOptions
from offload.loading.checkpoint import check_checkpoint
from offload.loading.huge_pages import move_to_huge_pages
from offload.loading.names import load_tokenizer, resolve_folder
from offload.loading.stock_model import load_stock_model
from offload.models import LeanModel, lean_model_maker
from offload.models.batch import pack
from offload.policies import Policy
from offload.runtime.cache import OffloadedCache
from offload.runtime.config import runtime_config
from offload.runtime.opening import open_loaded, with_calibrated_policy
from offload.runtime.runtime import Runtime
from offload.system.errors import DeviceMemoryError
from offload.system.torch_threads import torch_threads

OnDone = Callable[[str, int, int], None]  # what is being made, how much of it is done, and in all
Opener = Callable[[Policy], DecodeSession]


def ignore(what: str, done: int, total: int) -> None:
    """An `OnDone` for nobody."""


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
        options: `device`, `backend`, `dtype` and `num_threads` of `RuntimeConfig`.
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
