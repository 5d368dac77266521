"""A model type without lean layers, loaded with transformers' own modules, and tried before use."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.free_room import SPARE_BYTES
from offload.decode.latents import expanded_bytes, transposed_bytes
from offload.decode.stock_attention import (
    AttentionSpec,
    attention_specs,
    use_eager_attention,
    use_offload_attention,
)
from offload.kv.format import KVFormat
from offload.kv.store import HostBudgetError, KVStore
from offload.loading.checkpoint import Checkpoint, check_checkpoint
from offload.loading.generic_packing import expert_bytes, parameter_bytes, stays_packed
from offload.loading.one_at_a_time import loading
from offload.loading.stock_model import (
    generic_skeleton,
    load_delimiter_classes,
    load_generic_model,
)
from offload.models import ALWAYS_LEAN, ModelShape
from offload.models.base import ALIBI_POSITIONS, stock_context_limit
from offload.models.hybrid import TYPES, HybridModel
from offload.models.missing_features import READ_AT_ONCE, has_alibi, unsupported_generic
from offload.models.packed_linear import PackedMatrix
from offload.models.stock_view import StockView
from offload.planning.profile import typical_profile
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.policies.auto import Auto
from offload.policies.full import Full
from offload.runtime.auto_policy import Room, resolve_auto
from offload.runtime.budgets import (
    device_kv_budget_bytes,
    kv_budget_bytes,
    pool_threads,
    weight_bytes_of,
)
from offload.runtime.config import RuntimeConfig
from offload.runtime.corrector import give_back
from offload.runtime.fingerprint import fingerprint
from offload.runtime.fused_layers import use_fused_layers
from offload.runtime.generation import Generation, GenerationRequest
from offload.runtime.generic_cache import GenericCache, HostedLayers, LayerStates
from offload.runtime.generic_runner import GenericRunner
from offload.runtime.generic_sizes import (
    EXACT_ALIBI,
    GenericSizes,
    check_policy,
    num_pages,
    policy_bytes,
    resolve_generic,
    row_bytes,
    shape_of,
    store_and_attention,
)
from offload.runtime.generic_states import SequenceStates
from offload.runtime.generic_steps import GenericSteps, hybrid_view
from offload.runtime.host_experts import (
    copied_bytes,
    experts_left_out,
    experts_of,
    left_out_bytes,
    run_from_host,
    with_number,
)
from offload.runtime.module_steps import ModuleSteps, check_one_step
from offload.runtime.modules_device import (
    LEAST_SLICE,
    ModulesDevice,
    PassBytes,
    check_weights_fit,
    token_bytes,
)
from offload.runtime.mtp_head import MOST_DRAFTS, HeadFiles, MtpDrafts, MtpHead
from offload.runtime.placing import known_profile, longest_context
from offload.runtime.pooled_modules import POOLED_TOKENS, multiplies_on_pool, use_pool
from offload.runtime.sequences import Sequences
from offload.system.autocast import current_device
from offload.system.errors import DeviceMemoryError
from offload.system.memory import format_bytes
from offload.system.torch_threads import torch_threads

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Options that need lean layers; other values than these are refused.
_TAKEN = {"policy", "dtype", "kv_dtype", "device", "max_memory", "num_threads", "page_tokens"}
_UNUSED = {"deadline_seconds"}  # a step's: here no side waits for the other
_DEFAULTS = {x.name: x.default for x in fields(RuntimeConfig) if x.name not in _TAKEN | _UNUSED}
# Of logits, over their standard deviation. Wrong attention has more than 1; rounding, to bfloat16
# or of inputs of packed experts, changes which experts a token gets: single logits differ by much.
_MOST_DIFFERENCE = 1e-3  # the largest, in float32
_MOST_ROUNDED_DIFFERENCE = 0.2  # the mean
_MOST_OF_ANY = 0.6  # the mean, even where two attention functions of transformers differ by more
_STATES_KEPT = 4  # of sequences, a GPU has room for beside keys and values, or gives these back
_LONG = 2**17  # tokens, of which a layer's keys and values lie there while a prompt is read
_FEW_SCORES = 2**18  # of queries and keys: attention on one thread takes less than the products


class GenericRuntime:
    """What runs a model of transformers' own modules: its threads, store and sequences.

    Attributes:
        stock: the model, on which `use_offload_attention` was called.
        hosted: its layers whose keys and values are in the store.
        resident: the same, where a device attends to all; None if the CPU does, or selects.
        decodes: whether the forward pass that runs is a decode step.
        reads_prompt: whether what runs is a part of a prompt, even if it is a token.
        is_in_engine: it is a pass of an engine, which checks modules where it reads prompts.
        current_generation: what counts forward passes.
        policy: what `config` asks for, or "auto" came to.
        policy_reason: why "auto" came to the policy; "" if that was asked for.
        states: of sequences, outside of the store.
        decoder, runner: as an engine uses those of a `Runtime`.
    """

    ranks = None
    scores_prompts = False

    def __init__(
        self,
        stock: Any,
        specs: dict[int, AttentionSpec],
        config: RuntimeConfig,
        folder: Path | None,
        pool: WorkerPool,
        cached: Sequence[Any] | None = None,
    ) -> None:
        """Args:
        cached: its cache layers of two rows, where its modules may run in steps of a GPU; None:
            they may not.
        """
        self.stock, self.policy_reason, self._folder = stock, "", folder
        self._head: MtpHead | None = None
        self.decodes = self.reads_prompt = self.is_in_engine = False
        self.device = torch.device(config.device)
        weight_bytes, left_out = weight_bytes_of(stock, self.device.type), 0
        weight_bytes += copied_bytes(stock, config)
        if self.device.type != "cpu":
            left_out = weight_bytes_of(stock, "cpu")
        elif not is_on_device(config):
            weight_bytes += transposed_bytes(stock)
        host_bytes = kv_budget_bytes(config, weight_bytes, loaded=True, host_bytes=left_out)
        is_auto = isinstance(config.policy, Auto)
        view: HybridModel | StockView | None = None
        modules: ModuleSteps | None = None
        if is_on_device(config):
            view = hybrid_view(stock)
        if isinstance(view, HybridModel):
            view = replace(view, **experts_of(stock, config))
        elif is_on_device(config) and cached is not None:
            modules = _module_steps(stock, specs, cached)
            view = None if modules is None else modules.view
        if is_on_device(config) and view is None:
            check_row_dtype(config)
        device_bytes = None if view is None else device_bytes_beside(stock, view, config)
        if isinstance(config.policy, Auto):
            most, _ = stock_context_limit(stock.config)
            if has_alibi(stock.config.to_dict()):
                policy, reason = EXACT_ALIBI
            elif view is not None and device_bytes is not None:
                sizes = stock.dtype, host_bytes, device_bytes
                policy, reason = resolved_on_gpu(config.policy, view.shape, config, *sizes)
            else:
                policy, reason = resolved_auto(
                    config.policy, specs, config, stock.dtype, most, host_bytes
                )
            config, self.policy_reason = config.under(policy), reason
            logger.info("auto: %s", reason)
        self.config, self.policy = config, config.policy
        self.pool = pool
        self._on_pool = self.device.type == "cpu" and multiplies_on_pool(stock)
        self.store, self.attention = store_and_attention(
            specs,
            config,
            pool,
            dtype=stock.dtype,
            host_budget_bytes=host_bytes,
            pinned=self.device.type == "cuda",
        )
        classes = None
        if self.policy.state.reads_text and folder is not None:
            classes = load_delimiter_classes(folder, stock.config.vocab_size)
        self.steps: GenericSteps | None = None
        if view is not None:
            of_steps = self.store, config, pool, device_bytes, lambda: self.decodes
            try:
                self.steps = GenericSteps(stock, view, modules, *of_steps)
            except (ValueError, NotImplementedError) as error:  # of a policy that a CPU runs
                self.store.close()
                if modules is None:
                    raise
                raise _NotAsOneStepError(f"fails: {error}") from error
            self.attention = self.steps.decoder.attention
        held, weights = LayerStates(), dict(stock.named_parameters())
        decoder = None if self.steps is None else self.steps.decoder
        self.states = self.decoder = SequenceStates(self.store, held, decoder)
        self.sequences = Sequences(
            self.store,
            self.attention,
            self.states,
            None,
            classes,
            fingerprint=partial(fingerprint, weights, stock.config, self.policy, self.store),
        )
        self.hosted = HostedLayers(
            stock.config,
            specs,
            self.sequences,
            self.attention,
            held,
            steps_on_device=self.steps is not None,
            states=self.states,
        )
        if is_on_device(config):
            row = row_bytes(self.store)
            held.modules = ModulesDevice(stock, config, row, lambda: held.held_bytes)
        else:
            self.store.ledger.add("windows and recurrent states", lambda: held.held_bytes)
        self.resident: HostedLayers | None = None
        keeps = is_auto or not self.policy.selects
        if is_on_device(config) and self.steps is None and specs and keeps:
            self.resident = self._resident(specs, held.modules)
        self.runner = GenericRunner(self, [*signature(stock.forward).parameters])
        self.run_lock = self.sequences.run_lock
        self.current_generation = Generation(config.num_threads)
        self.on_tokens: Any = None

    def _resident(self, specs: dict[int, AttentionSpec], modules: Any) -> HostedLayers:
        """Layers of caches without keys and values on the host."""
        store = KVStore(
            num_layers=1,
            num_kv_heads=1,
            head_dim=16,
            dtype=self.store.dtype,
            host_budget_bytes=self.store.host_budget_bytes,
            page_tokens=self.config.page_tokens,
        )
        attention = DecodeAttention(Full(), store, num_qo_heads=1, pool=self.pool)
        sequences = Sequences(store, attention, SequenceStates(store, LayerStates()), None, None)
        others = LayerStates(modules=modules)
        return HostedLayers(
            self.stock.config, specs, sequences, attention, others, is_resident=True
        )

    def has_cache(self, cache: GenericCache) -> bool:
        """Whether this runtime made it."""
        stores = [self.store] if self.resident is None else [self.store, self.resident.store]
        return any(cache.store is store for store in stores)

    def cache_for(self, request: GenerationRequest) -> GenericCache:
        """A new cache of a generation: on the modules' device if there is room for all of it."""
        modules, resident = self.hosted.others.modules, self.resident
        if modules is not None and resident is not None:
            columns = request.prompt_columns + request.max_new_tokens
            rows = len(request.prompt_lens)
            others = request.times_states * rows * resident.others.at(columns)
            if modules.has_room(rows, columns, others):
                return GenericCache(resident)
        return self.new_cache()

    @property
    def lean(self) -> Any:
        """There are none.

        Raises:
            NotImplementedError: always; names what runs without.
        """
        raise NotImplementedError(
            f"a model of type {self.stock.config.model_type!r} has no lean layers: generate(), "
            "forward(), Engine and `offload serve` run it; calibrations need one of "
            f"{', '.join(ALWAYS_LEAN)}"
        )

    @property
    def shape(self) -> ModelShape:
        """The heads of its layers in the store; sizes that decide on no policy are 0."""
        return shape_of(self.hosted.specs.values())

    @property
    def has_positions(self) -> bool:
        """Whether the model has a number of them: else only memory bounds a context."""
        limit, _ = stock_context_limit(self.stock.config)
        return limit not in (ALIBI_POSITIONS, sys.maxsize)

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may have; without a number of positions as many as there is room
        for."""
        most, _ = stock_context_limit(self.stock.config)
        return min(most, max(1, self.store.host_budget_bytes // self.store.token_bytes))

    def new_cache(self, seqs: Sequence[int] | None = None) -> GenericCache:
        """Of the caller's sequences, or of new ones."""
        return GenericCache(self.hosted, seqs)

    def load_cache(self, path: Path) -> GenericCache:
        """What `GenericCache.save` has written; raises: as `OffloadedCache.load`."""
        most, _ = stock_context_limit(self.stock.config)
        return GenericCache.load(self.hosted, path, most)

    def close(self) -> None:
        """Give its threads and the memory of its store back."""
        self.close_store()
        self.pool.close()

    def close_store(self) -> None:
        """All but the threads, which others may use; the stock modules are as they were."""
        if self.steps is not None:
            self.steps.close()
        self.store.close()
        if self.resident is not None:
            self.resident.store.close()

    @contextmanager
    def generation(self, *, has_assistant: bool = False) -> Iterator[Generation]:
        """Around one generation: new statistics, torch on one thread between passes, and no cache
        left behind by an error."""
        outer = self.current_generation
        threads = outer.prefill_threads or torch.get_num_threads()
        self.check_modules()
        generation = self.current_generation = Generation(threads, is_running=True)
        try:
            with torch_threads(1):  # in its passes a prompt has more
                yield generation
        except BaseException:
            if generation.owns_cache and generation.cache is not None:
                generation.cache.reset()
            raise
        finally:
            if not outer.is_running:
                self.states.end_generation()
                outer = Generation(self.config.num_threads, stats=generation.stats)
            self.current_generation = outer

    def run(self, forward: Callable[[], T], cache: GenericCache | None, *inputs: Any) -> T:
        """A stock forward pass on this model's threads, as `GenericCache.forward_pass` has it.

        Args:
            inputs: of `forward_pass`.

        Raises:
            NotImplementedError: several tokens behind others, of a type that `reads_at_once`.
        """
        if cache is not None and inputs[0][1] > 1:
            self._check_reads(cache.kv_lens)
        counter = self.current_generation
        if not (counter.is_running or self.is_in_engine):
            self.check_modules()
        counter.begin_pass()
        decodes = not self.reads_prompt and cache is not None and cache.would_decode(inputs[0])
        if decodes and cache is not None:
            with torch_threads(counter.prefill_threads):
                counter.count_index(self._build_states(cache))
        elif cache is not None and self.steps is not None and cache.steps_on_device:
            self.sequences.collect()
            self.states.begin_prompt(cache.seqs)
            self._make_device_room(self.steps.decoder, cache, inputs[0])
        in_cache: AbstractContextManager[None] = nullcontext()
        if cache is not None:
            in_cache = cache.forward_pass(*inputs, is_decode=decodes)
        batch_size, n = inputs[0]
        num_scores = batch_size * n * (n + max(cache.kv_lens, default=0) if cache else n)
        alone = self._on_pool and batch_size * n <= POOLED_TOKENS and num_scores <= _FEW_SCORES
        with torch_threads(1 if decodes or alone else counter.prefill_threads), in_cache:
            try:
                self.decodes = decodes
                result = forward()
            finally:
                self.decodes = False
        counter.count_pass("decode" if decodes else "prefill", batch_size * n)
        stats = counter.stats
        stats.kv_host_bytes = max(stats.kv_host_bytes, self.store.host_bytes_used)
        if cache is not None and cache.others.modules is not None:
            on_device = cache.state_bytes
            if self.steps is not None:
                on_device += self.steps.decoder.device_bytes
            stats.kv_device_bytes = max(stats.kv_device_bytes, on_device)
        stats.policy_host_bytes = max(stats.policy_host_bytes, self.attention.states.num_bytes)
        return result

    def load_head(self, *, given_ids: bool) -> None:
        """Read the head for multi-token prediction, once, before a generation that drafts.

        Raises:
            NotImplementedError, ValueError: there can be no drafts; says why.
            HostBudgetError: its weights do not fit.
        """
        if is_on_device(self.config):
            raise NotImplementedError(
                f"use_mtp=True with device={self.config.device!r}: drafts of a model without lean "
                "layers are verified on a CPU only, since a GPU's step is a graph of one token of "
                "each sequence; leave use_mtp out"
            )
        num_drafts = self.current_generation.draft_tokens
        if not 1 <= num_drafts <= MOST_DRAFTS:
            raise ValueError(
                f"num_assistant_tokens={num_drafts} with use_mtp=True: 1 to {MOST_DRAFTS}"
            )
        if not given_ids:
            raise NotImplementedError(
                "use_mtp=True with inputs_embeds: the head reads ids; give input_ids"
            )
        if self._head is not None:
            return
        if self._folder is None:
            raise ValueError("use_mtp=True with a model that was not loaded from a folder")
        checkpoint = check_checkpoint(self._folder, takes_generic=True)
        of_model = self.stock.config, self.stock.dtype, self.config.packing
        files = HeadFiles(checkpoint, *of_model)
        what = "the head for multi-token prediction"
        self.store.check_room(files.num_bytes, what, "leave use_mtp out")
        with torch_threads(self.config.num_threads):
            head = self._head = MtpHead(self.stock, files, self.pool)
        self.store.ledger.add("head for multi-token prediction", lambda: head.held_bytes)

    def drafts_of(self, generation_config: Any, processors: Any) -> MtpDrafts:
        """What drafts in the generation that runs."""
        generation = self.current_generation
        assert self._head is not None  # `load_head` has run
        return MtpDrafts(
            self._head,
            generation,
            generation_config.max_length,
            processors,
            samples=generation_config.do_sample,
        )

    def _make_device_room(
        self, decoder: DeviceDecoder, cache: GenericCache, shape: tuple[int, int]
    ) -> None:
        """For a part of a prompt: keys and values of steps leave the device where it has none."""
        while True:
            try:
                return cache.check_pass(shape)
            except DeviceMemoryError as error:
                failure = DeviceMemoryError(str(error))
            if not give_back(decoder, cache.seqs, failure):
                raise failure

    def _build_states(self, cache: GenericCache) -> float:
        """What the policy keeps of sequences before a step; the seconds that it takes. Of those
        that have none yet on the device, where that is faster than on the host."""
        start, attention, store = time.perf_counter(), cache.attention, cache.store
        lens = dict(zip(cache.seqs, cache.kv_lens, strict=True))
        states, new = attention.states, list[int]()
        if cache.steps_on_device and states.has_arrays:
            new = [seq for seq in lens if states.arrays_of(seq) is None]
        if new:
            build = attention.prefill_build(new, [lens[seq] for seq in new])
            for seq, layer_idx in itertools.product(new, range(store.num_layers if build else 0)):
                num_kv_heads, head_dim = store.heads_of(layer_idx)
                shape = 2, num_kv_heads, lens[seq], head_dim
                keys, values = torch.empty(shape, dtype=store.dtype, device=self.device)
                store.gather(seq, layer_idx, 0, lens[seq], out=(keys, values))
                assert build is not None
                build.on_layer(layer_idx, seq, keys, values)
            if build is not None:
                build.finish()
        attention.build_states(cache.seqs, [n + 1 for n in lens.values()])
        return time.perf_counter() - start

    def check_modules(self) -> None:
        """Refuse a model that was changed after its kernels were made (`ModuleWatch`)."""
        if self.steps is not None:
            self.steps.check_modules()

    def check_room(self, cache: GenericCache, request: GenerationRequest) -> int:
        """Refuse a generation that could not come to its end; columns of a prompt that may be read
        at a time.

        Raises:
            ValueError: it is longer than the model's positions.
            HostBudgetError: the host budget does not suffice for KV cache and policy state.
            DeviceMemoryError: the modules' device has no room for states and a part of the prompt.
        """
        store, states = cache.store, cache.attention.states
        ends = [n + request.max_new_tokens for n in request.prompt_lens]
        own_pages = sum(map(store.num_own_pages, cache.seqs))
        pages = num_pages(store, ends) - own_pages
        state = policy_bytes(states.bytes, ends)
        columns = request.prompt_columns + request.max_new_tokens
        others = request.times_states * len(ends) * cache.others.at(columns) - cache.state_bytes
        modules = self.hosted.others.modules
        if request.drafts and self._head is not None:
            others += max(ends) * self._head.row_bytes
        need = pages * store.page_bytes + max(0, state - states.bytes_of(cache.seqs))
        need += others if modules is None else 0
        cache.check_room(need, pages, f"{len(ends)} sequences of up to {max(ends)} tokens")
        self.check_context(max(ends))
        if modules is None:
            return request.prompt_columns
        self.states.begin_generation(len(ends), max(ends))
        return modules.slice_tokens(len(ends), request.prompt_columns, others)

    @property
    def reads_at_once(self) -> bool:
        """Whether its modules forget the states of a prompt of which more is read."""
        return self.stock.config.model_type in READ_AT_ONCE

    def _check_reads(self, kv_lens: Sequence[int]) -> None:
        if self.reads_at_once and any(kv_lens):
            raise NotImplementedError(
                f"several tokens behind {max(kv_lens)} that are cached, with a model of type "
                f"{self.stock.config.model_type!r}: transformers' modules of it begin with empty "
                "states there; give the whole text and a new cache, without prefill_chunk_size"
            )

    def check_context(self, num_tokens: int) -> None:
        """Refuse a sequence of `num_tokens` tokens that the model cannot have."""
        most, reason = stock_context_limit(self.stock.config)
        if num_tokens > most:
            raise ValueError(
                f"a context of {num_tokens} tokens exceeds the {most} tokens of this model "
                f"({reason}); shorten the prompt or lower max_new_tokens"
            )


def resolved_auto(
    auto: Auto,
    specs: dict[int, AttentionSpec],
    config: RuntimeConfig,
    dtype: torch.dtype,
    max_context: int,
    host_kv_bytes: int,
) -> tuple[Policy, str]:
    """What `auto` comes to for the longest context that the model and the host's memory allow, and
    why.

    Args:
        specs: of the layers that attend to everything.
        max_context: positions of the model.
    """
    work, on_gpu = None, is_on_device(config)
    if specs:
        shape = shape_of(specs.values(), max_context)
        tokens = longest_context(config, shape, dtype, host_kv_bytes)
        work = Workload(shape, auto, tokens, dtype=dtype, kv_dtype=config.kv_dtype)
    profile = known_profile(torch.device(config.device), pool_threads(config))
    return resolve_generic(auto, specs, work, profile, on_gpu=on_gpu)


def device_bytes_beside(
    stock: Any, view: HybridModel | StockView, config: RuntimeConfig
) -> int | None:
    """What a GPU has for keys and values beside weights that are there, states and slices of
    prompts; None: it is none."""
    device = torch.device(config.device)
    if device.type == "cpu":
        return None
    weight_bytes, free = weight_bytes_of(stock, device.type), torch.cuda.mem_get_info(device)[0]
    copied = copied_bytes(stock, config)
    budget, free = device_kv_budget_bytes(config, weight_bytes + copied), free - copied
    kept = bytes_of_pass(stock, view, LEAST_SLICE, _LONG)
    return max(0, (free if budget is None else min(free, budget)) - kept)


def bytes_of_pass(stock: Any, view: HybridModel | StockView, n: int, columns: int) -> int:
    """What a GPU needs for n new columns, the last of `columns`, beside states of sequences."""
    kv_bytes = KVFormat(stock.dtype, keys_only=view.shape.latent_dim > 0).token_bytes(
        1, view.shape.num_kv_heads, view.shape.head_dim
    )
    passes = PassBytes(token_bytes(stock), kv_bytes + expanded_bytes(stock), n)
    states = _STATES_KEPT * view.state_bytes
    columns = min(view.shape.max_context, columns)
    return passes.need(1, min(n, columns), columns, states)


def _module_steps(
    stock: Any, specs: dict[int, AttentionSpec], cached: Sequence[Any]
) -> ModuleSteps | None:
    """What runs the modules in steps of a GPU; None: steps do not compute them."""
    states = LayerStates()
    states.count(cached, 2, specs)
    with suppress(NotImplementedError):
        return ModuleSteps(stock, specs, shape_of(specs.values()), states.at(sys.maxsize))
    return None


def resolved_on_gpu(
    auto: Auto,
    shape: ModelShape,
    config: RuntimeConfig,
    dtype: torch.dtype,
    host_kv_bytes: int,
    device_kv_bytes: int,
) -> tuple[Policy, str]:
    """`resolved_auto` where a GPU attends, as of lean layers."""
    tokens = longest_context(config, shape, dtype, host_kv_bytes)
    work = Workload(shape, auto, tokens, dtype=dtype, page_tokens=config.page_tokens)
    threads = pool_threads(config)
    profile = known_profile(torch.device(config.device), threads) or typical_profile(threads)
    slices = config.prefill_slice_tokens
    return resolve_auto(auto, work, Room(True, device_kv_bytes, slices, profile))


def resolved_before_loading(checkpoint: Checkpoint, config: RuntimeConfig) -> Policy:
    """The policy of a config, or what it comes to if that is `auto`, before any weight is read.

    Raises: as `GenericSizes.of`.
    """
    if not isinstance(config.policy, Auto):
        return config.policy
    if has_alibi(checkpoint.config):
        return EXACT_ALIBI[0]
    empty, kept = generic_skeleton(checkpoint, config.dtype, config.packing)
    sizes = GenericSizes.of(empty, kept, on_gpu=is_on_device(config))
    most, _ = stock_context_limit(empty.config)
    host_bytes = kv_budget_bytes(config, sizes.weight_bytes, loaded=False)
    return resolved_auto(config.policy, sizes.specs, config, empty.dtype, most, host_bytes)[0]


def check_generic(checkpoint: Checkpoint, config: RuntimeConfig) -> None:
    """Refuse what a model without lean layers does not do yet.

    Raises:
        NotImplementedError: names the option, or the policy; a kv_dtype that does not fit.
    """
    model_type = checkpoint.config["model_type"]
    text_type = (checkpoint.config.get("text_config") or checkpoint.config).get("model_type")
    check_policy(config, checkpoint.config)
    for name, default in _DEFAULTS.items():
        value = getattr(config, name)
        is_taken = name == "backend" and value == "inline"
        is_taken = is_taken or (name == "prefill_slice_tokens" and is_on_device(config))
        is_taken = is_taken or (name.endswith("_experts") and text_type in TYPES)
        is_taken = is_taken or (name == "weights" and not checkpoint.stored_types)
        if name == "weights" and value != default and not is_taken:
            raise NotImplementedError(stays_packed(value, model_type))
        if value != default and not is_taken:
            raise NotImplementedError(
                f"{name}={value!r} with a model of type {model_type!r}, which has no lean layers "
                f"and runs with {name}={default!r} only; types with lean layers: "
                f"{', '.join(ALWAYS_LEAN)}"
            )
    KVFormat.of(config.kv_dtype, checkpoint.loaded_dtype(config.dtype))


def check_row_dtype(config: RuntimeConfig) -> None:
    """Refuse int8 rows where modules are apart from attention, and steps are not one graph."""
    if config.kv_dtype == "int8":
        raise NotImplementedError(
            f"kv_dtype='int8' with device={config.device!r}, which needs decode steps that are one "
            "graph: those of this model are not; give kv_dtype='auto'"
        )


def checked_skeleton(checkpoint: Checkpoint, config: RuntimeConfig) -> tuple[Any, RuntimeConfig]:
    """The model without memory for its weights, for which there will be room, and the config with a
    number for `host_experts`.

    Raises:
        HostBudgetError, DeviceMemoryError: the weights do not fit.
        ValueError: more layers of `host_experts` than have experts.
        NotImplementedError: experts on the host of a model whose layers the kernels do not compute.
    """
    empty, kept = generic_skeleton(checkpoint, config.dtype, config.packing)
    weight_bytes, host_bytes = sum(parameter_bytes(empty, kept).values()), 0
    if config.kv_dtype == "int8" and is_on_device(config) and hybrid_view(empty) is None:
        try:
            check_one_step(empty, GenericSizes.of(empty, kept, on_gpu=True).specs)
        except NotImplementedError:
            check_row_dtype(config)
    if config.host_experts:
        sizes, view = [*expert_bytes(empty, kept).values()], hybrid_view(empty)
        if view is None:
            raise NotImplementedError(
                f"host_experts={config.host_experts!r} with layers of type "
                f"{empty.config.model_type!r} that the kernels do not compute; leave it out"
            )
        slices, whole = config.prefill_slice_tokens, view
        num_experts = max((x.num_experts for x in view.routed.values()), default=0)
        config = with_number(
            config,
            empty.config.model_type,
            sizes,
            num_experts,
            lambda: weight_bytes + SPARE_BYTES + bytes_of_pass(empty, whole, slices, slices),
        )
        host_bytes, copied = left_out_bytes(sizes, config, num_experts)
        weight_bytes += copied
    weight_bytes -= host_bytes
    kv_budget_bytes(config, weight_bytes, loaded=False, host_bytes=host_bytes)
    device_kv_budget_bytes(config, weight_bytes)
    check_weights_fit(config, weight_bytes)
    return empty, config


def is_on_device(config: RuntimeConfig) -> bool:
    """Whether modules and decode attention are apart; on a CPU for tests."""
    return config.device != "cpu" or config.backend == "inline"


@loading()
def load_generic(
    checkpoint: Checkpoint, config: RuntimeConfig, kind: type[GenericRuntime] = GenericRuntime
) -> GenericRuntime:
    """Load a model, once it has given the logits of the stock path.

    Args:
        kind: of what runs it.

    Raises:
        As `OffloadedModel.from_pretrained`, and `generic_runtime`.
    """
    start = time.perf_counter()
    check_generic(checkpoint, config)
    empty, config = checked_skeleton(checkpoint, config)
    stock = load_generic_model(checkpoint, config.dtype, config.packing, empty).eval()
    if config.device != "cpu":
        with experts_left_out(stock, config):
            stock.to(config.device)
    with torch_threads(config.num_threads), current_device(torch.device(config.device)):
        runtime = generic_runtime(stock, config, checkpoint.folder, kind)
    layers = len(runtime.hosted.specs)
    logger.info(
        "loaded %s in %.1f s: transformers' own modules on %s, %d layers in the host store, "
        "policy %s; %s of host KV cache",
        checkpoint.folder,
        time.perf_counter() - start,
        config.device,
        layers,
        runtime.policy.name,
        format_bytes(runtime.store.host_budget_bytes),
    )
    return runtime


def generic_runtime(
    stock: Any,
    config: RuntimeConfig,
    folder: Path | None,
    kind: type[GenericRuntime] = GenericRuntime,
) -> GenericRuntime:
    """What runs a stock model that is loaded; its modules use our attention from now on.

    Args:
        folder: of its tokenizer; None: the policy reads no text.

    Raises:
        ValueError: it does not give the stock path's logits, or its attention cannot be taken over;
            says why.
    """
    model_type = stock.config.model_type
    run_from_host(stock, config)
    pool = WorkerPool(pool_threads(config))
    try:
        if not is_on_device(config):  # packed weights, here and below: nothing is dequantised
            use_pool(stock, pool, None)
        expected = _logits(stock, DynamicCache(config=stock.config), None)
        specs, cached = attention_specs(stock)
        if any(spec.softcap for spec in specs.values()):  # SDPA leaves it out in some versions
            use_eager_attention(stock)
            expected = _logits(stock, DynamicCache(config=stock.config), None)
            use_offload_attention(stock)
        of_model = stock, specs, config, folder, pool
        try:
            return _tried(kind(*of_model, cached), expected)
        except _NotAsOneStepError as error:
            logger.info("decode steps run module by module, as one step %s", error)
        return _tried(kind(*of_model), expected)
    except (HostBudgetError, DeviceMemoryError, MemoryError, torch.OutOfMemoryError):
        pool.close()
        raise
    except Exception as error:  # of any kind: 150 model types
        pool.close()
        reason = str(error) or type(error).__name__
        raise ValueError(unsupported_generic(model_type, reason)) from error


class _NotAsOneStepError(Exception):
    """A step of the stock modules is no graph, or does not give their logits."""


def _tried(runtime: GenericRuntime, expected: Tensor) -> GenericRuntime:
    """A runtime that gives the logits `expected` of `_logits`; its store is closed if it fails."""
    stock, pool = runtime.stock, runtime.pool
    try:
        if not is_on_device(runtime.config):
            use_pool(stock, pool, lambda: runtime.decodes)
            use_fused_layers(stock, pool, lambda: runtime.decodes)
        is_rounded = stock.dtype != torch.float32 or runtime.store.format.is_int8
        is_exact = not is_rounded and not any(
            isinstance(module, PackedMatrix) for module in stock.modules()
        )
        for layers in (runtime.hosted, runtime.resident):
            if layers is not None:
                cache = GenericCache(layers)
                _check_logits(stock, _logits(stock, cache, runtime), expected, is_exact=is_exact)
                layers.others.measure(cache)
                cache.reset()
    except (HostBudgetError, DeviceMemoryError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        runtime.close_store()
        if runtime.steps is not None and runtime.steps.has_modules:
            raise _NotAsOneStepError(f"fails: {type(error).__name__}: {error}") from error
        raise
    if runtime.steps is not None:
        runtime.steps.may_give_up = True
    runtime.current_generation = Generation(runtime.config.num_threads)
    return runtime


def _logits(stock: Any, cache: Any, runtime: GenericRuntime | None) -> Tensor:
    """Of a padded prompt of two rows and three steps, [4, 2, vocab_size]."""
    columns = torch.arange(22, device=stock.device).view(2, 11)
    ids = columns * 7 % min(61, stock.config.get_text_config().vocab_size - 5) + 5
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    logits = []
    for first, last in ((0, 8), (8, 9), (9, 10), (10, 11)):
        inputs = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last]}

        def forward(inputs: dict[str, Tensor] = inputs) -> Any:
            return stock(**inputs, past_key_values=cache, use_cache=True)

        with torch.no_grad():
            if runtime is None:
                out = forward()
            else:
                shape = (2, last - first)
                out = runtime.run(forward, cache, shape, *reversed(inputs.values()))
        logits.append(out.logits[:, -1].float().cpu())
    return torch.stack(logits)


def _check_logits(stock: Any, found: Tensor, expected: Tensor, *, is_exact: bool) -> None:
    """Refuse logits that differ by more than rounding, which may change the experts of a token."""
    differences = (found - expected).abs() / expected.std()
    difference = float(differences.max() if is_exact else differences.mean())
    most = _MOST_DIFFERENCE if is_exact else _MOST_ROUNDED_DIFFERENCE
    if not is_exact and difference > most:  # perhaps two of transformers' own differ as much
        use_eager_attention(stock)
        other = _logits(stock, DynamicCache(config=stock.config), None)
        use_offload_attention(stock)
        own = float((other - expected).abs().mean() / expected.std())
        most = max(most, min(2.0 * own, _MOST_OF_ANY))
    if not difference <= most:
        raise NotImplementedError(
            f"its logits differ from the stock path's by {difference:.2g} of their standard "
            f"deviation (at most {most:.2g} is rounding)"
        )
