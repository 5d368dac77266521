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
from torch import Tensor

from cpu_ops.packed import FORMATS, quantise
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
from offload.models.packed_experts import pack_experts
from offload.models.shape import MODEL_SHAPES, SHAPE_TYPES
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


def check_weights(shape: str, weights: str) -> None:
    """NotImplementedError for packed weights that a shape's own checkpoints have nothing like."""
    if SHAPE_TYPES.get(shape) == "gpt_oss" and weights == "q4":
        raise NotImplementedError(
            f"weights='q4' with the shape {shape!r}: its experts take q8, which stands for their "
            "MXFP4; give weights='q8'"
        )


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
        self._made = MODEL_SHAPES[shape].with_layers(num_layers or most)
        self._type = SHAPE_TYPES.get(shape)
        check_weights(shape, config.weights)

    @cached_property
    def stock(self) -> Any:
        # Synthetic keys may reach further than the model's own positions: a step takes as long.
        longest = max(self._made.max_context, self._longest)
        shape = replace(self._made, max_context=longest)
        with _room_for_weights(self.shape):
            made = random_model(
                shape,
                device=self.device,
                dtype=self.dtype,
                seed=self._seed,
                model_type=self._type,
            )
            if self.config.weights in FORMATS:
                pack = _pack_experts if self._type == "gpt_oss" else pack_weights
                pack(made, self.config.weights)
            return made

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """What opens a session of one of `policies` behind prompts of `kv_len` tokens.

        Raises:
            HostBudgetError: caches that do not fit.
        """
        lean = lean_model(self.stock)
        with closing(WorkerPool(pool_threads(self.config))) as pool:  # decoders have their own
            cache = structured_model_cache(
                self._made,
                kv_len=kv_len,
                num_steps=num_steps,
                ropes=[lean.ropes[rope_idx] for rope_idx in lean.each("rope_idx")],
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
        _keep_sizes(self.stock, lean, cache.rows.rows)
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
    """The lean view of a stock model, for engines whose layers have heads alike.

    Raises:
        NotImplementedError: a layer has other heads than the first.
    """
    lean = lean_model_maker(stock.config.model_type, heads_may_differ=True)(stock)
    check_alike([layer.spec for layer in lean.layers], "the graph of all on the GPU")
    return lean


def _keep_sizes(stock: Any, lean: LeanModel, rows: Tensor) -> None:
    """Have norms of heads leave synthetic queries and keys, of `QKVRows`, about as large as they
    are: it decides how sharp attention is. A GPU's step norms them; native layers do not."""
    widths = [lean.shape.query_width, lean.shape.num_kv_heads * lean.shape.head_dim]
    for layer_idx, (layer, stock_layer) in enumerate(
        zip(lean.layers, stock.model.layers, strict=True)
    ):
        if layer.q_norm is None or layer.k_norm is None:
            continue
        attention, of_layer = stock_layer.self_attn, rows[:, layer_idx].float()
        queries, keys = torch.split(of_layer[..., : sum(widths)], widths, -1)
        for norm, view, heads in (
            (attention.q_norm, layer.q_norm, queries),
            (attention.k_norm, layer.k_norm, keys),
        ):
            # What a weight of 0 stands for, its family knows.
            norm.weight.fill_(heads.pow(2).mean().sqrt() - (view.weight - norm.weight).mean())


def _pack_experts(stock: Any, weights: str) -> None:
    """Experts, whose matrices are [num_experts, in, out], become packed; other matrices stay, as in
    checkpoints with MXFP4 experts."""
    for layer_idx, layer in enumerate(stock.model.layers):
        for projection in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, projection).detach().transpose(1, 2)
            packed = quantise(weight.flatten(0, 1), weights)
            name = f"model.layers.{layer_idx}.mlp.experts.{projection}"
            pack_experts(stock, name, packed, stock.dtype)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what is no longer used: the next engine may need all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
