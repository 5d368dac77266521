"""`OffloadedModel`: a stock transformers model whose forward pass runs on the offload runtime.

`from_pretrained` returns an instance of a subclass of the stock class, made on the fly with
`OffloadedModel` in front. It has the stock class's name, weights, config and `generate()`, so that
pipelines, `save_pretrained` and evaluation harnesses take it for what it is; only the forward pass,
the cache that `generate()` makes and its loop over greedy tokens are ours.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from offload.kv_compression.bound import CONDENSED_SHARE
from offload.loading.checkpoint import check_model_type
from offload.loading.names import HubOptions
from offload.models import is_generic
from offload.ranks.group import connect
from offload.runtime.cache import OffloadedCache
from offload.runtime.config import RuntimeConfig, runtime_config
from offload.runtime.fixed_model import FixedModel
from offload.runtime.generation import GenerationRequest
from offload.runtime.generic_model import load_generic_model
from offload.runtime.inputs import (
    check_cache,
    check_labels,
    check_tokens,
    empty_rows,
    keep_positions,
    pack_rows,
    refuse_unsupported,
    rows_shape,
)
from offload.runtime.model_loading import LoadedModel, find_folder, load_model
from offload.runtime.quality import Quality
from offload.runtime.run_lock import locked
from offload.runtime.runtime import Runtime
from offload.runtime.stats import OffloadStats
from offload.runtime.token_loop import fast_options, generate_tokens
from offload.system.autocast import without_autocast
from offload.system.permissions import share_by_umask

if TYPE_CHECKING:
    from offload.decode.gpu.placement import HeadPlacement
    from offload.kv.store import KVStore
    from offload.policies import Policy


class OffloadedModel(FixedModel):
    """A causal language model with its KV cache in the host store. Make it by `from_pretrained`."""

    _offload: Runtime
    _policy_reason: str

    @classmethod
    @torch.inference_mode(False)
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        policy: str | Policy = "auto",
        dtype: str | torch.dtype | None = "auto",
        device: str | torch.device = "cpu",
        max_memory: dict[int | str, int | str] | None = None,
        num_threads: int | None = None,
        *,
        prefill_slice_tokens: int = 8192,
        page_tokens: int = 256,
        backend: str | None = None,
        deadline_seconds: float = 5.0,
        tensor_parallel_size: int = 1,
        placement: HeadPlacement | str | Path | None = None,
        quality_probe: float = 0.0,
        quality_floor: float | None = None,
        host_bytes_per_sequence: int | str | None = None,
        condense_by: str = "auto",
        condensed_share: float = CONDENSED_SHARE,
        cache_correction_every: int | None = None,
        weights: str = "auto",
        kv_dtype: str = "auto",
        host_experts: int | str = 0,
        hot_experts: int | None = None,
        cache_dir: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str | None = None,
        gguf_file: str | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Load a model.

        Args:
            name_or_path: a folder with safetensors, a .gguf file, a hub id, or an alias of
                the embedded model: "smollm2-135m-instruct", or "smollm2-135m-instruct-32k" with
                32,768 positions.
            policy: a name (see `available_policies()`) or a policy object. "auto" is exact
                attention until another policy is faster here: `policy` and `policy_reason` of the
                model say what it came to. "full" is exact attention always.
            dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
            device: "cpu", "cuda" or "cuda:1"; with a GPU the KV cache stays on the host and the
                CPU attends to it.
            max_memory: hard limits such as {"cpu": "96GiB"} (weights and KV cache together), or
                {0: "20GiB", "cpu": "96GiB"} with a GPU.
            num_threads: CPU threads; default: all this process may use.
            prefill_slice_tokens: see `RuntimeConfig`, which describes all options from this one to
                `hot_experts`. `weights`: "auto" (as a GGUF file has them), "q8", "q4" or a name of
                a dtype; `kv_dtype`: "auto" (the model's), its name or "int8".
            cache_dir: as of transformers; so are the options from this one to `gguf_file`.
            unknown: nothing else is taken.

        Raises:
            TypeError: an unknown keyword argument; names those that there are.
            ValueError, FileNotFoundError, NotImplementedError: an unknown policy or dtype, a model
                type that is not supported, missing or damaged files.
            HostBudgetError: the weights do not fit `max_memory`. All before weights are read.
        """
        for name in unknown:
            known = [option.name for kind in (RuntimeConfig, HubOptions) for option in fields(kind)]
            raise TypeError(f"unknown keyword argument {name!r}; available: {', '.join(known)}")
        hub = HubOptions(cache_dir, force_download, local_files_only, token, revision, gguf_file)
        config = runtime_config(
            policy=policy,
            dtype=dtype,
            device=device,
            max_memory=max_memory,
            num_threads=num_threads,
            weights=weights,
            kv_dtype=kv_dtype,
            host_experts=host_experts,
            hot_experts=hot_experts,
            prefill_slice_tokens=prefill_slice_tokens,
            page_tokens=page_tokens,
            backend=backend,
            deadline_seconds=deadline_seconds,
            tensor_parallel_size=tensor_parallel_size,
            placement=placement,
            quality_probe=quality_probe,
            quality_floor=quality_floor,
            host_bytes_per_sequence=host_bytes_per_sequence,
            condense_by=condense_by,
            condensed_share=condensed_share,
            cache_correction_every=cache_correction_every,
        )
        ranks = connect(config.tensor_parallel_size, config.device)
        together = nullcontext() if ranks is None else ranks.together()
        with together, without_autocast(torch.device(config.device)):
            folder = find_folder(name_or_path, hub, ranks)
            if is_generic(check_model_type(folder / "config.json"), where=config.runs_on):
                return load_generic_model(folder, config)
            return _offloaded(load_model(name_or_path, folder, config, ranks))

    @can_return_tuple  # type: ignore[untyped-decorator]
    @locked
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: OffloadedCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        token_type_ids: torch.Tensor | None = None,
        cache_position: torch.Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """As the stock forward pass. Logits of padding are those of a zero hidden state, but for
        the last of a row without any token, which `generate()` continues.

        Computed in the model's dtype: `torch.autocast` and `torch.compile` change nothing.

        Args:
            input_ids: int64 [batch_size, seq_len], or `inputs_embeds` [..., hidden_size].
            attention_mask: [batch_size, cached columns + seq_len], 0 at padding.
            past_key_values: an `OffloadedCache` of this model; continued in place.
            token_type_ids, cache_position: of no effect, as in the stock models.

        Returns:
            logits [batch_size, seq_len or logits_to_keep, vocab_size], the cache, and the loss if
            there are labels. Nothing has gradients.

        Raises:
            ValueError, RuntimeError: shapes that disagree, a context that is too long; K/V that are
                not finite.
            HostBudgetError: new tokens that do not fit; the cache is as it was.
            NotImplementedError: attention weights and hidden states; weights, modules or hooks
                inside the model that were changed since it was loaded. Weights may be written to in
                place, but not be replaced, and only the model itself may have forward hooks.
        """
        for name, wanted in (
            ("output_attentions", output_attentions),
            ("output_hidden_states", output_hidden_states),
        ):
            if getattr(self.config, name, False) if wanted is None else wanted:
                raise NotImplementedError(
                    f"{name}=True: an offloaded model keeps no attention weights or hidden states; "
                    "use the stock model for a short context"
                )
        input_ids, attention_mask, position_ids = (
            None if x is None else x.cpu() for x in (input_ids, attention_mask, position_ids)
        )
        shape = rows_shape(input_ids, inputs_embeds, self._offload.lean.shape.hidden_size)
        cache = self._cache(past_key_values, use_cache)
        # Outside of generate() equal rows stand for any: with them lm-eval seeks how large a batch
        # may be.
        shares_rows = self._offload.current_generation.is_running
        rows = (input_ids if shares_rows else None, attention_mask, position_ids)
        batch = pack_rows(shape, *rows, cache, self._offload.check_context)
        self._offload.check_modules()
        tokens, embeddings = self._embed(batch.columns, input_ids, inputs_embeds)
        if len(empty := empty_rows(attention_mask)):
            _, of_empty = self._embed((empty + 1) * shape[1] - 1, input_ids, inputs_embeds)
        hidden, phase = self._offload.run(embeddings, batch, cache, tokens)
        hidden = batch.to_rows(hidden)
        if len(empty):
            hidden[empty, -1] = self._offload.run_unattended(of_empty)
        hidden = keep_positions(hidden, logits_to_keep)
        logits = self._offload.runner.logits(hidden, phase)
        loss = None
        if labels is not None:
            check_labels(labels, logits)
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The stock `generate()`, its passes as `forward` computes them and with its errors.

        A thread at a time; others wait. A logits processor, stopping criterion or streamer may call
        the model itself, but must not wait for another thread that does: both would wait for ever.
        A call that fails frees its KV cache at once. A streamer may have `on_tokens`, which is told
        how many tokens of the prompt have gone through one more layer.
        """
        on_tokens = getattr(kwargs.get("streamer"), "on_tokens", None)
        assistant, run_lock = kwargs.get("assistant_model"), self._offload.run_lock
        of_assistant = (
            assistant._offload.run_lock if isinstance(assistant, OffloadedModel) else run_lock
        )
        # In one order, or two threads that want the same two would wait for each other.
        first, second = sorted((run_lock, of_assistant), key=lambda run_lock: run_lock.number)
        generation = self._offload.generation(
            has_assistant=assistant is not None, on_tokens=on_tokens
        )
        with first.lock, second.lock, generation:
            return super().generate(*args, **kwargs)

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Behind `generate()`: our loop where the step can choose tokens, or the stock one.

        Ours has no forward pass that hooks could see.
        """
        options = None
        hooked = self._forward_hooks or self._forward_pre_hooks or "forward" in vars(self)
        if not synced_gpus and not hooked and model_kwargs.get("use_cache"):
            options = fast_options(logits_processor, stopping_criteria, generation_config)
        if options is None or not self._offload.chooses_tokens(options):
            self._offload.decoder.finish_captures()
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        is_first = not generation_config.is_assistant
        return generate_tokens(
            self._offload,
            self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first),
            options,
            input_ids,
            stopping_criteria,
            generation_config,
            streamer,
            model_kwargs,
        )

    def new_cache(self) -> OffloadedCache:
        """An empty cache: pass it as `past_key_values` to continue across calls."""
        return OffloadedCache(self._offload.sequences)

    def offload_stats(self) -> OffloadStats:
        """Tokens, times and KV bytes of the last `generate()`, and the forward passes since."""
        return self._offload.current_generation.stats

    def quality(self) -> Quality:
        """How much of the exact attention mass decode steps kept, since the model was loaded.

        Raises:
            ValueError: it was loaded without `quality_probe`.
        """
        return self._offload.quality()

    @property
    def policy(self) -> Policy:
        """Which cached tokens a decode step attends to; what "auto" came to."""
        return self._offload.config.policy

    @property
    def policy_reason(self) -> str:
        """Why "auto" came to `policy`; "" if that was asked for."""
        return self._policy_reason

    @property
    def kv_store(self) -> KVStore:
        """The host KV store of this model."""
        self._offload.sequences.collect_if_idle()
        return self._offload.store

    def _embed(
        self,
        columns: torch.Tensor,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Ids int64 [n], where they are given, and new embeddings [n, hidden_size] of `columns` [n]
        of the flattened rectangle."""
        if inputs_embeds is not None:
            columns = columns.to(inputs_embeds.device)
            given = inputs_embeds.flatten(0, 1)[columns].to(self.device, self.dtype)
            scale = self._offload.lean.embedding_scale
            return None, given if scale == 1.0 else given * scale
        assert input_ids is not None  # rows_shape has seen to it
        tokens = input_ids.flatten()[columns]
        check_tokens(tokens, self.config.vocab_size)
        embeddings: torch.Tensor = self._offload.lean.embed_tokens(tokens.to(self.device))
        return tokens, embeddings

    def _cache(
        self, past_key_values: OffloadedCache | None, use_cache: bool | None
    ) -> OffloadedCache | None:
        if past_key_values is not None:
            check_cache(past_key_values, self._offload.store)
            return past_key_values
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return self.new_cache() if use_cache else None

    # How transformers calls us back.

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The stock inputs, without what stock models take and ignore, and what is cached."""
        for name in ("tokenizer", "assistant_tokenizer"):
            kwargs.pop(name, None)
        if kwargs.get("is_first_iteration") and kwargs.get("next_sequence_length") is None:
            given, generation = input_ids, self._offload.current_generation
            if inputs_embeds is not None:
                given = inputs_embeds
            kwargs["next_sequence_length"] = generation.num_new_columns(given.shape[1])
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        return inputs

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Make the cache of a generation, once it is sure that all its tokens will fit."""
        mask, has_ranks = model_kwargs.get("attention_mask"), self._offload.ranks is not None
        refuse_unsupported(generation_config, mask, has_ranks=has_ranks)
        drafts = generation_mode == "assisted_generation"
        request = GenerationRequest.of(generation_config, model_kwargs, batch_size, drafts=drafts)
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            check_cache(cache, self._offload.store)
            cache._is_user_defined = True  # generate() asks for it
        elif generation_config.use_cache is False:
            self._offload.check_context(request.max_tokens)
            return
        model_kwargs["past_key_values"] = self._offload.begin_generation(
            request, cache, is_draft=generation_config.is_assistant
        )
        if generation_mode not in ("greedy_search", "sample"):
            self._offload.decoder.finish_captures()

    def _prepare_generated_length(
        self, generation_config: Any, input_ids_length: int, **given: Any
    ) -> Any:
        """As the stock one; the request needs the ids that max_length counts."""
        generation_config._given_ids = input_ids_length
        return super()._prepare_generated_length(
            generation_config=generation_config, input_ids_length=input_ids_length, **given
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock one; not of a part. Weights get the permissions of the other files."""
        if self._offload.ranks is not None:
            raise NotImplementedError(
                "save_pretrained with tensor_parallel_size: each rank has a part of the weights; "
                "load the model without it and save that"
            )
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        if (folder := Path(save_directory)).is_dir():
            share_by_umask(folder, "*.safetensors")
        return saved

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """Behind transformers' `generate_batch`: its interface, on `offload.engine`.

        Most of its config, and its hints, are about memory that we count ourselves.
        """
        if self._offload.run_lock.is_mine:
            raise NotImplementedError(
                'continuous batching within generate(), as cache_implementation="paged" wants it: '
                "its thread would wait for this one for ever; call model.generate_batch(...)"
            )
        # By name, because the engine stands on this package.
        manager = importlib.import_module("offload.engine.continuous_batching")
        return manager.ContinuousBatchingManager(
            self, generation_config or self.generation_config, continuous_batching_config
        )


def _offloaded(opened: LoadedModel) -> Any:
    """Turn its stock model into an offloaded one, in place."""
    stock, runtime = opened.stock, Runtime(opened)
    stock_class: Any = type(stock)
    stock.__class__ = _offloaded_class(stock_class)
    stock._offload = runtime
    stock._policy_reason = opened.policy_reason
    return stock


@functools.cache
def _offloaded_class(stock_class: Any) -> Any:
    namespace = {
        "__module__": __name__,
        "__doc__": OffloadedModel.__doc__,
        # torch.compile has nothing to gain here, and stumbles over our kernels' objects.
        "forward": torch.compiler.disable(OffloadedModel.forward),  # type: ignore[no-untyped-call]
    }
    # The stock name, because save_pretrained writes it to config.json as the architecture.
    return type(stock_class.__name__, (OffloadedModel, stock_class), namespace)
