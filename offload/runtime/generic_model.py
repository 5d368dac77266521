"""`GenericModel`: a stock model of any type whose KV cache lies in the host store.

Its modules are transformers' own, but for attention. Made like an `OffloadedModel`, on the fly, in
front of the stock class, whose `forward` and `generate()` it keeps.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.loading.checkpoint import check_checkpoint
from offload.runtime.config import RuntimeConfig
from offload.runtime.fixed_model import FixedModel
from offload.runtime.generation import GenerationRequest
from offload.runtime.generic_cache import GenericCache
from offload.runtime.generic_loading import GenericRuntime, load_generic
from offload.runtime.inputs import refuse_unsupported
from offload.runtime.run_lock import locked
from offload.runtime.stats import OffloadStats
from offload.system.autocast import current_device, without_autocast

if TYPE_CHECKING:
    from offload.kv.store import KVStore
    from offload.policies import Policy

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_DRAFTS = "assisted_generation"


class GenericModel(FixedModel):
    """A causal language model of transformers' own modules. Layers that attend to all tokens have
    their keys and values in the host store, and decode with the native kernels under a policy.

    `OffloadedModel.from_pretrained` makes it of model types without lean layers.
    """

    _offload: GenericRuntime
    _is_stateful = False  # for transformers: states go back where drafts are taken back

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The stock `generate()`: greedy, sampled or beams, a thread at a time.

        With `use_mtp=True` the checkpoint's own head for multi-token prediction drafts
        `num_assistant_tokens` at a time (1).

        Raises:
            NotImplementedError: assistants, other drafts, those with a GPU or a GGUF file.
            ValueError: `use_mtp=True`, and the checkpoint has no such head.
            HostBudgetError: before anything is computed, if not all tokens will fit.
        """
        runtime = self._offload
        if kwargs.get("assistant_model") is not None:
            raise _unsupported("assistant_model")
        settings = kwargs.get("generation_config") or self.generation_config
        asked = kwargs.get("num_assistant_tokens", settings.num_assistant_tokens)
        with runtime.run_lock.lock, runtime.generation() as generation:
            generation.draft_tokens = 1 if asked is None else asked
            args, kwargs = self._on_device(args), self._on_device(kwargs)
            return super().generate(*args, **kwargs)

    def _on_device(self, given: Any) -> Any:
        """Arguments, tensors on the device of the modules."""
        if isinstance(given, dict):
            return dict(zip(given, self._on_device([*given.values()]), strict=True))
        return [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in given]

    @locked
    def _run_pass(self, forward: Any, given: dict[str, Any]) -> Any:
        """A stock forward pass with the arguments `given`, by name."""
        if given.get("output_attentions") or getattr(self.config, "output_attentions", False):
            raise NotImplementedError("output_attentions=True: no attention weights are kept")
        for name in ("tokenizer", "assistant_tokenizer"):  # generate() hands them on
            given.pop(name, None)
        ids, embeds, mask = (
            given.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask")
        )
        if (ids is None) == (embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if mask is not None and mask.dim() != 2:
            raise NotImplementedError(f"attention_mask must have 2 dimensions, got {mask.dim()}")
        columns: Any = embeds if ids is None else ids
        shape = tuple(columns.shape[:2])
        cache, use_cache = given.get("past_key_values"), given.get("use_cache")
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = given["past_key_values"] = self.new_cache()
        if cache is not None:
            self._check_cache(cache)
            given["use_cache"] = True
        given = self._on_device(given)
        with without_autocast(self.device), current_device(self.device):
            return self._offload.run(partial(forward, self, **given), cache, shape, mask, ids)

    def new_cache(self) -> GenericCache:
        """An empty cache: pass it as `past_key_values` to continue across calls."""
        return self._offload.new_cache()

    def offload_stats(self) -> OffloadStats:
        """Tokens, times and KV bytes of the last `generate()`, and the forward passes since."""
        return self._offload.current_generation.stats

    @property
    def policy(self) -> Policy:
        """Which cached tokens a decode step attends to."""
        runtime = self._offload
        return runtime.policy

    @property
    def policy_reason(self) -> str:
        """Why "auto" came to `policy`; "" if that was asked for."""
        return self._offload.policy_reason

    @property
    def kv_store(self) -> KVStore:
        """The host KV store of this model."""
        self._offload.sequences.collect_if_idle()
        return self._offload.store

    def _check_cache(self, cache: Any) -> None:
        if not isinstance(cache, GenericCache) or not self._offload.has_cache(cache):
            raise ValueError(
                f"past_key_values must be a cache of this model, got {type(cache).__name__}; make "
                "it by model.new_cache()"
            )

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Make the cache of a generation, once it is sure that all its tokens will fit."""
        drafts = generation_mode == _DRAFTS and bool(generation_config.use_mtp)
        if generation_mode not in _MODES and not drafts:
            raise _unsupported(str(getattr(generation_mode, "value", generation_mode)))
        if generation_config.use_mtp and not drafts:
            raise _unsupported("use_mtp=True and beams")
        refuse_unsupported(generation_config, model_kwargs.get("attention_mask"), has_head=True)
        cache = model_kwargs.get("past_key_values")
        if cache is None and generation_config.use_cache is False:
            return
        if cache is not None:
            self._check_cache(cache)
            cache._is_user_defined = True  # generate() asks for it
        self._offload.sequences.collect()
        request = GenerationRequest.of(generation_config, model_kwargs, batch_size, drafts=drafts)
        if drafts:
            self._offload.load_head(given_ids=model_kwargs.get("inputs_embeds") is None)
        used = self._offload.cache_for(request) if cache is None else cache
        slice_tokens = self._offload.check_room(used, request)
        if model_kwargs.get("inputs_embeds") is None and slice_tokens < request.prompt_columns:
            asked = generation_config.prefill_chunk_size
            generation_config.prefill_chunk_size = min(slice_tokens, asked or slice_tokens)
        generation = self._offload.current_generation
        generation.cache, generation.owns_cache = used, cache is None
        generation.prompt_columns, generation.gives_all = request.prompt_columns, request.gives_all
        model_kwargs["past_key_values"] = used

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """The stock inputs; of a draft also the tokens that its cache owes, and of what is cached
        no more than that."""
        cache, generation = kwargs.get("past_key_values"), self._offload.current_generation
        if isinstance(cache, GenericCache) and cache.takes_back:
            if kwargs.get("is_first_iteration"):
                new = generation.num_new_columns(input_ids.shape[1])
            else:
                new = kwargs["next_sequence_length"] + cache.num_owed
            kwargs["next_sequence_length"] = new
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _get_candidate_generator(self, generation_config: Any, **given: Any) -> Any:
        drafts = self._offload.drafts_of(generation_config, given["logits_processor"])
        hook = self.get_decoder().register_forward_hook(drafts.note)
        self._offload.current_generation.at_end.enter_context(hook)
        return drafts

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock one; what is owed is read at the end, if the caller has the cache."""
        generation = self._offload.current_generation
        cache = generation.cache
        if cache is None:  # with use_cache=False
            return super()._assisted_decoding(*args, **kwargs)
        with cache.verifying(), generation.at_end:
            out = super()._assisted_decoding(*args, **kwargs)
            if cache.num_owed and not generation.owns_cache:
                ids = getattr(out, "sequences", out)[:, -1 - cache.num_owed : -1]
                self(input_ids=ids, past_key_values=cache)
        return out

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock one; a prompt, or the last chunk of it, may be a single token."""
        self._offload.reads_prompt = True
        try:
            return super()._prefill(*args, **kwargs)
        finally:
            self._offload.reads_prompt = False

    def _prepare_generated_length(
        self, generation_config: Any, input_ids_length: int, **given: Any
    ) -> Any:
        """As the stock one; the request needs the ids that max_length counts."""
        generation_config._given_ids = input_ids_length
        return super()._prepare_generated_length(
            generation_config=generation_config, input_ids_length=input_ids_length, **given
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the engine needs lean layers."""
        return self._offload.lean


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} with a model that has no lean layers: it generates greedily, by sampling "
        "or with beams; leave it out"
    )


def load_generic_model(folder: Path, config: RuntimeConfig) -> Any:
    """The model of a folder, of a type without lean layers.

    Raises: as `OffloadedModel.from_pretrained`.
    """
    return generic_model(load_generic(check_checkpoint(folder, takes_generic=True), config))


def generic_model(runtime: GenericRuntime) -> Any:
    """Turn the stock model of `runtime` into a generic one, in place."""
    stock: Any = runtime.stock
    stock_class: Any = type(stock)
    stock.__class__ = _generic_class(stock_class)
    stock._offload = runtime
    return stock


@functools.cache
def _generic_class(stock_class: Any) -> Any:
    signature = inspect.signature(stock_class.forward)
    others = [x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD]

    @functools.wraps(stock_class.forward)  # generate() reads its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        for name in others:
            given |= given.pop(name, {})
        return self._run_pass(stock_class.forward, given)

    namespace = {"__module__": __name__, "__doc__": GenericModel.__doc__, "forward": forward}
    return type(stock_class.__name__, (GenericModel, stock_class), namespace)
