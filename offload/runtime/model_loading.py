"""From a name and options to what a model runs with: each thing is resolved once, here."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpu_ops.native import isa_name
from cpu_ops.packed import FORMATS, GROUP
from offload.decode.attention import needs_alike_layers
from offload.decode.gpu.placement import HeadPlacement
from offload.kv.format import KVFormat
from offload.loading.checkpoint import Checkpoint, check_checkpoint
from offload.loading.generic_packing import stays_packed
from offload.loading.gguf import weights_folder
from offload.loading.huge_pages import move_to_huge_pages
from offload.loading.names import HubOptions, checkpoint_name, resolve_folder
from offload.loading.one_at_a_time import loading
from offload.loading.stock_model import folder_tokenizer, load_delimiter_classes, load_stock_model
from offload.models import LeanModel, ModelShape, family_of, lean_model_maker
from offload.models.base import check_alike
from offload.models.rank_part import keep_own_weights, rank_view
from offload.policies import Policy
from offload.ranks.group import TensorParallel
from offload.ranks.shares import head_ranges, mlp_ranges
from offload.runtime.auto_policy import told_loss, with_resolved_policy
from offload.runtime.backends import decode_backend
from offload.runtime.budgets import (
    device_kv_budget_bytes,
    kv_budget_bytes,
    pool_threads,
    rank_kv_budget_bytes,
    weight_bytes_before_loading,
    weight_bytes_of,
)
from offload.runtime.capping import with_cap_in_tokens
from offload.runtime.compressing import check_bound
from offload.runtime.config import RuntimeConfig
from offload.runtime.host_experts import (
    copied_bytes,
    experts_left_out,
    experts_of,
    host_expert_bytes,
    with_host_experts,
)
from offload.runtime.placing import Chooser, placement_for
from offload.system.captures import CAPTURING
from offload.system.memory import format_bytes, host_memory
from offload.system.slow_here import slow_here

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What a model runs with.

    Attributes:
        stock: the model of transformers, on its device; of ranks, this one's part.
        lean: its layers.
        config: as asked for, with the policy that `auto` came to and what it has learned; of ranks,
            this one's.
        delimiter_classes: uint8 [vocab_size], for policies that read the text; None: not read.
        num_threads: of the worker pool.
        backend: of the steps of a `DeviceDecoder`; None: the native kernels decode.
        host_kv_bytes, device_kv_bytes: for the KV cache; None: as much as the GPU has.
        placement: see `placement_for`.
        choose: for what is to come, see `placing.Chooser`; None: the placement is for all.
        policy_reason: why `auto` came to the policy of `config`; "": that was asked for.
    """

    stock: Any
    lean: LeanModel
    config: RuntimeConfig
    delimiter_classes: npt.NDArray[np.uint8] | None
    num_threads: int
    backend: str | None
    host_kv_bytes: int
    device_kv_bytes: int | None
    placement: HeadPlacement | None
    choose: Chooser | None = None
    policy_reason: str = ""

    @property
    def device(self) -> torch.device:
        """Where its linear layers run."""
        return torch.device(self.config.device)


def find_folder(name_or_path: str | Path, hub: HubOptions, ranks: TensorParallel | None) -> Path:
    """`resolve_folder`, which may have to download or to convert: of ranks, one does."""
    find = partial(resolve_folder, name_or_path, hub)
    folder: Path = find() if ranks is None else ranks.once(find)
    return folder


@loading()
def load_model(
    name_or_path: str | Path, folder: Path, config: RuntimeConfig, ranks: TensorParallel | None
) -> LoadedModel:
    """Load the model of a folder, once it is sure that it will run.

    Args:
        name_or_path: as it was asked for, to be told.

    Raises:
        As `OffloadedModel.from_pretrained`.
    """
    start, memory = time.perf_counter(), host_memory()
    checkpoint = check_checkpoint(folder)
    config = with_host_experts(checkpoint, config)
    config, reason = with_resolved_policy(checkpoint, config, ranks)
    if not reason and (loss := told_loss(checkpoint, config)):
        logger.info("policy %s: %s", config.policy.name, loss)
    config = with_cap_in_tokens(checkpoint, config, ranks)
    check_before_loading(checkpoint, config, ranks)
    is_packed = bool(checkpoint.stored_types and config.packing)
    if ranks is not None and not is_packed:  # one converts for all
        ranks.once(partial(weights_folder, folder, checkpoint.loaded_dtype(config.dtype)))
    if checkpoint.stored_types and config.weights == "auto" and not config.packing:
        logger.info(
            "weights=auto: %s is dequantised; on a GPU, and on a CPU in one process with its own "
            "backend, its matrices would stay packed",
            name_or_path,
        )
    stock = load_stock_model(checkpoint, config.dtype, config.packing).eval()
    if ranks is None:
        move_to_device(stock, config)
        config = with_calibrated_policy(stock, config, folder)
    else:
        config = with_calibrated_policy(stock, config, folder, ranks)  # the whole fits here only
        config = keep_own_part(stock, config, ranks)
        move_to_device(stock, config)
    opened = replace(prepare_loaded(stock, config, folder, ranks), policy_reason=reason)
    logger.info(
        "loaded %s in %.1f s: %d threads, ISA %s, policy %s; %s of host KV cache%s; %s",
        name_or_path,
        time.perf_counter() - start,
        opened.num_threads,
        isa_name(),
        _described(opened.config.policy),
        format_bytes(opened.host_kv_bytes),
        " in int8" if opened.config.kv_dtype == "int8" else "",
        f"max_memory['cpu'] is {format_bytes(limit)}"
        if (limit := config.max_memory.get("cpu")) is not None
        else memory.explained(),
    )
    for what in slow_here(opened.stock.dtype, on_cpu=opened.device.type == "cpu"):
        logger.info("slow here: %s", what)
    return opened


def _described(policy: Policy) -> str:
    """Its name, and its budget if it has one."""
    return f"{policy.name}, budget_tokens={policy.budget_tokens}" if policy.selects else policy.name


def move_to_device(stock: Any, config: RuntimeConfig) -> None:
    """A model, or a rank's part of it; what reads its weights from now on runs there."""
    if config.device == "cpu":
        move_to_huge_pages(stock)
    else:
        with experts_left_out(stock, config):
            stock.to(config.device)


def prepare_loaded(
    stock: Any, config: RuntimeConfig, folder: Path | None, ranks: TensorParallel | None = None
) -> LoadedModel:
    """A loaded model on its device; of ranks, `stock` and `config` are this one's already.

    Args:
        folder: of the tokenizer; None: the model reads no text.

    Raises:
        HostBudgetError, DeviceMemoryError: the weights do not fit.
        NotImplementedError: the backend, or what `check_heads` refuses, is not for this model.
    """
    classes = None
    if config.policy.state.reads_text and folder is not None:
        classes = load_delimiter_classes(folder, stock.config.vocab_size)
    whole = lean_model_maker(stock.config.model_type, heads_may_differ=True)(stock)
    check_heads(whole, config, ranks)
    lean = replace(rank_view(whole, ranks), **experts_of(stock, config))
    device = torch.device(config.device)
    copied = copied_bytes(stock, config)
    weight_bytes = weight_bytes_of(stock, device.type) + copied
    host_bytes = 0 if device.type == "cpu" else weight_bytes_of(stock, "cpu")
    num_threads = pool_threads(config, ranks)
    host_kv_bytes = rank_kv_budget_bytes(
        config, weight_bytes, lean.shape.num_kv_heads, ranks, host_bytes
    )
    backend = None
    if device.type == "cuda" or config.backend is not None:
        backend = decode_backend(lean, config.backend, device)
    device_kv_bytes = device_kv_budget_bytes(config, weight_bytes)
    choose = None
    if device.type == "cuda" and config.placement is None:
        choose = Chooser.of(config, lean.shape, stock.dtype, num_threads)
    placement = placement_for(
        config,
        lean,
        choose,
        dtype=stock.dtype,
        host_kv_bytes=host_kv_bytes,
        device_kv_bytes=device_kv_bytes,
        taken_bytes=copied,
    )
    return LoadedModel(
        stock=stock,
        lean=lean,
        config=config,
        delimiter_classes=classes,
        num_threads=num_threads,
        backend=backend,
        host_kv_bytes=host_kv_bytes,
        device_kv_bytes=device_kv_bytes,
        placement=placement,
        choose=choose,
    )


def check_heads(lean: LeanModel, config: RuntimeConfig, ranks: TensorParallel | None) -> None:
    """Where layers differ in their heads, have windows or sinks, refuse what is not for that before
    it is allocated.

    Raises:
        NotImplementedError: names the option, and the first layer that differs or the window.
    """
    policy, shape = config.policy, lean.shape
    of_policy = needs_alike_layers(policy, shape.num_layers, shape.num_kv_heads)
    of_device, of_backend = f"device={config.device!r}", f"backend={config.backend!r}"
    of_this_policy = f"policy={policy.name!r}, which {of_policy},"
    needs = {
        "a model of several ranks": ranks is not None,
        of_device: config.device != "cpu",
        of_backend: config.backend is not None,
        "host_bytes_per_sequence": config.host_bytes_per_sequence is not None,
        "quality_probe": config.quality_probe > 0.0,
        "cache_correction_every": config.cache_correction_every is not None,
        of_this_policy: of_policy != "",
    }
    for what, is_asked in needs.items():
        if is_asked:
            check_alike([layer.spec for layer in lean.layers], what)
    window = max(lean.each("window"))
    if not window and all(layer.sinks is None for layer in lean.layers):
        return
    whose = f"layers that see a window of {window} tokens" if window else "attention with sinks"
    units = shape.num_layers, shape.num_kv_heads
    by_unit = [policy.roles(*units), policy.unit_members(*units)] if policy.selects else []
    for of_windows in (of_this_policy, of_device, of_backend):
        needs.pop(of_windows, None)
    needs[f"policy={policy.name!r}, which tells layers or heads apart,"] = any(
        x is not None for x in by_unit
    )
    for what, is_asked in needs.items():
        if is_asked:
            raise NotImplementedError(
                f"{what} is not for {whose} yet; others decode "
                "in one process under policies such as 'full', 'exact_topk' and 'sketch'"
            )


def check_before_loading(
    checkpoint: Checkpoint, config: RuntimeConfig, ranks: TensorParallel | None
) -> None:
    """Refuse, before any weight is read, what would not fit.

    Raises:
        HostBudgetError, DeviceMemoryError: weights beyond max_memory. What one rank's GPU will hold
            is known when it has its part (`keep_own_part`).
        ValueError, NotImplementedError: a policy that is not for this model, or not for ranks; more
            ranks than KV heads, or ranks between which packed weights cannot be cut; a kv_dtype
            that does not fit the model.
    """
    if config.weights in FORMATS and checkpoint.packs_as_generic:
        raise NotImplementedError(stays_packed(config.weights, checkpoint.config["model_type"]))
    family = family_of(checkpoint.config)
    if config.weights in FORMATS and family is not None and not family.packs_dense:
        raise NotImplementedError(
            f"weights={config.weights!r} with a model of type {family.model_type!r}: give "
            "weights='auto' or a dtype, or a checkpoint with MXFP4 experts"
        )
    host_bytes, copied = host_expert_bytes(checkpoint, config)
    weight_bytes = weight_bytes_before_loading(checkpoint, config) - host_bytes + copied
    kv_budget_bytes(config, weight_bytes, loaded=False, host_bytes=host_bytes)
    shape = checkpoint.shape
    config.policy.check_model(**shape.heads)
    dtype = checkpoint.loaded_dtype(config.dtype)
    KVFormat.of(config.kv_dtype, dtype, [shape.head_dim])
    check_bound(config, shape, checkpoint.config, dtype.itemsize)
    if config.placement is not None:
        config.placement.check_model(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads)
    if ranks is None:
        device_kv_budget_bytes(config, weight_bytes)
        return
    rank_policy(config.policy, ranks, shape)
    if config.weights in FORMATS or (checkpoint.stored_types and config.packing):
        _check_groups(shape, ranks.world_size)


def _check_groups(shape: ModelShape, world_size: int) -> None:
    """NotImplementedError if ranks would have parts of a group of packed weights."""
    of_head = shape.group_size * shape.head_dim
    cuts = {
        "o_proj": [part.start * of_head for part in head_ranges(shape.num_kv_heads, world_size)],
        "down_proj": [part.start for part in mlp_ranges(shape.intermediate_size, world_size)],
    }
    for name, starts in cuts.items():
        for start in (start for start in starts if start % GROUP):
            raise NotImplementedError(
                f"tensor_parallel_size={world_size} cuts {name} at input {start}, inside a group "
                f"of {GROUP} packed weights; give weights='bfloat16', or fewer ranks"
            )


def with_calibrated_policy(
    stock: Any, config: RuntimeConfig, folder: Path, ranks: TensorParallel | None = None
) -> RuntimeConfig:
    """The config, its policy with what it needs to learn from the model's attention first.

    It learns where the weights are. A plan was made before: of its placement, heads move with their
    roles. With ranks one of them learns; the model is still whole.
    """

    def make_lean() -> LeanModel:
        try:
            return lean_model_maker(stock.config.model_type)(stock)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"policy={config.policy.name!r}, which learns from the model first: {error}; give "
                "another, such as 'exact_topk' or 'sketch'"
            ) from error

    def calibrate() -> Policy:
        learnt: Policy = config.policy.calibration.learn(
            make_lean,
            model_type=stock.config.model_type,
            load_tokenizer=lambda: folder_tokenizer(folder),
            checkpoint=lambda: checkpoint_name(folder),
        )
        return learnt

    policy = calibrate() if ranks is None else ranks.once(calibrate)
    if stock.device.type == "cuda":  # what is free there is shared out next
        with CAPTURING:  # steps of another model
            torch.cuda.empty_cache()
    placement = config.placement
    if placement is not None and policy != config.policy:
        num_qo_heads = stock.config.num_attention_heads
        placement = placement.after_calibration(config.policy, policy, num_qo_heads)
    return replace(config, policy=policy, placement=placement)


def keep_own_part(stock: Any, config: RuntimeConfig, ranks: TensorParallel) -> RuntimeConfig:
    """Cut a stock model down to this rank's part; the config, its device and policy of that.

    Raises:
        DeviceMemoryError: the part does not fit the rank's GPU.
    """
    whole = lean_model_maker(stock.config.model_type)(stock)
    policy = rank_policy(config.policy, ranks, whole.shape)
    keep_own_weights(whole, ranks)
    config = replace(rank_config(config, ranks), policy=policy)
    device_kv_budget_bytes(config, weight_bytes_of(stock))
    return config


def rank_policy(policy: Policy, ranks: TensorParallel, shape: ModelShape) -> Policy:
    """A policy for this rank's heads of a model of `shape`.

    Raises:
        ValueError: more ranks than KV heads.
        NotImplementedError: the policy looks at heads of several ranks together.
    """
    heads = head_ranges(shape.num_kv_heads, ranks.world_size)[ranks.rank]
    return policy.of_heads(heads, **shape.kv_heads)


def rank_config(config: RuntimeConfig, ranks: TensorParallel) -> RuntimeConfig:
    """What `config` means for one rank: its GPU, and of max_memory what concerns it.

    Without a GPU its step runs inline: the native decoder runs all layers in one call, and has no
    place to wait for other ranks.
    """
    if config.device == "cpu":
        return replace(config, backend="inline")
    limits = {key: n for key, n in config.max_memory.items() if key in ("cpu", ranks.rank)}
    return replace(config, device=f"cuda:{ranks.rank}", max_memory=limits)
