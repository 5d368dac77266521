"""Experts that stay in the CPU's memory and run there, while a GPU computes the rest of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from offload.decode.gpu.free_room import SPARE_BYTES
from offload.loading.checkpoint import Checkpoint
from offload.loading.generic_packing import (
    check_host_experts,
    check_hot_experts,
    expert_bytes,
    hot_experts_beside,
    parameter_bytes,
)
from offload.loading.huge_pages import move_to_huge_pages
from offload.loading.stock_model import generic_skeleton
from offload.models import ModelShape
from offload.models.packed_experts import PackedExperts
from offload.models.routed_mlp import router_of
from offload.planning.placement_bytes import prefill_bytes
from offload.planning.workload import Workload
from offload.policies.full import Full
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.config import RuntimeConfig
from offload.system.memory import format_bytes

logger = logging.getLogger(__name__)


def with_host_experts(checkpoint: Checkpoint, config: RuntimeConfig) -> RuntimeConfig:
    """The config with numbers for `host_experts` and `hot_experts`, which are 0 for a model without
    experts under "auto"; before anything is allocated.

    Raises:
        ValueError: more layers than have experts, or more experts than a layer has.
    """
    if not config.host_experts:
        return config
    shape, dtype = checkpoint.shape, checkpoint.loaded_dtype(config.dtype)
    sizes, weight_bytes = list[int](), 0
    if shape.num_experts:
        skeleton = generic_skeleton(checkpoint, config.dtype, config.packing, is_lean=True)
        sizes, weight_bytes = [*expert_bytes(*skeleton).values()], total_bytes(*skeleton)
    return with_number(
        config,
        checkpoint.config["model_type"],
        sizes,
        shape.num_experts,
        lambda: weight_bytes + room_beside(shape, dtype, config.prefill_slice_tokens),
    )


def with_number(
    config: RuntimeConfig,
    model_type: str,
    sizes: Sequence[int],
    num_experts: int,
    needed: Callable[[], int],
) -> RuntimeConfig:
    """`with_host_experts` of a model whose layers with experts have these bytes of them.

    Args:
        num_experts: of each of these layers.
        needed: bytes that a GPU would need with all of them.
    """
    check_host_experts(config.host_experts, len(sizes), model_type)
    check_hot_experts(config.hot_experts, num_experts)
    if config.host_experts != "auto":
        return replace(config, hot_experts=config.hot_experts or 0)
    device = torch.device(config.device)
    if device.type == "cpu" or not sizes:
        return replace(config, host_experts=0, hot_experts=0)
    limit = config.max_memory.get(device.index or 0)
    if limit is None:
        limit = int(torch.cuda.mem_get_info(device)[0])
    count, hot = hot_experts_beside(sizes, num_experts, needed(), limit, config.hot_experts)
    if count:
        logger.info(
            "host_experts: the GPU may have %s and would need %s: experts of %d of %d layers stay "
            "on the host and run there, but for %d of each %d, those used most",
            format_bytes(limit),
            format_bytes(needed()),
            count,
            len(sizes),
            hot,
            num_experts,
        )
    return replace(config, host_experts=count, hot_experts=hot)


def total_bytes(empty: Any, kept: Mapping[str, str]) -> int:
    """Of all parameters of a `skeleton`."""
    return sum(parameter_bytes(empty, kept).values())


def room_beside(shape: ModelShape, dtype: torch.dtype, slice_tokens: int) -> int:
    """Bytes of a GPU that "auto" leaves beside the weights: a slice of a prompt, and to spare."""
    tokens = min(slice_tokens, shape.max_context or slice_tokens)
    return SPARE_BYTES + prefill_bytes(Workload(shape, Full(), tokens, dtype=dtype), tokens)


def host_expert_bytes(checkpoint: Checkpoint, config: RuntimeConfig) -> tuple[int, int]:
    """As `left_out_bytes`, of a model whose other weights go to a GPU."""
    if not config.host_experts or not checkpoint.shape.num_experts:
        return 0, 0
    skeleton = generic_skeleton(checkpoint, config.dtype, config.packing, is_lean=True)
    sizes = [*expert_bytes(*skeleton).values()]
    return left_out_bytes(sizes, config, checkpoint.shape.num_experts)


def left_out_bytes(
    sizes: Sequence[int], config: RuntimeConfig, num_experts: int
) -> tuple[int, int]:
    """Of these sizes of layers' experts, bytes that stay on the host, and those of them of which a
    GPU has copies; num_experts: of a layer, 0 where none has some."""
    if config.device == "cpu" or not isinstance(config.host_experts, int):
        return 0, 0
    stays = sum(sizes[: config.host_experts])
    return stays, stays * (config.hot_experts or 0) // max(1, num_experts)


def copied_bytes(stock: Any, config: RuntimeConfig) -> int:
    """Bytes of the copies that a GPU will have of a loaded model's experts on the host."""
    owners = [stock.model.layers[i].mlp for i in layers_of(stock, config)]
    return sum(
        weight_bytes_of(mlp.experts) * (config.hot_experts or 0) // len(router_of(mlp).weight)
        for mlp in owners
    )


def layers_of(stock: Any, config: RuntimeConfig) -> list[int]:
    """The first `host_experts` layers that have experts."""
    count = config.host_experts if isinstance(config.host_experts, int) else 0
    if not count:
        return []
    layers = enumerate(stock.model.layers)
    return [i for i, layer in layers if hasattr(layer.mlp, "experts")][:count]


def experts_of(stock: Any, config: RuntimeConfig) -> dict[str, Any]:
    """`LeanModel.host_experts` and `hot_experts`."""
    layers = frozenset(layers_of(stock, config))
    return {"host_experts": layers, "hot_experts": config.hot_experts or 0}


@contextmanager
def experts_left_out(stock: Any, config: RuntimeConfig) -> Iterator[None]:
    """What is done to the model inside, such as a move to a GPU, is not done to these experts."""
    owners = [stock.model.layers[i].mlp for i in layers_of(stock, config)]
    experts = [owner._modules.pop("experts") for owner in owners]
    try:
        yield
    finally:
        for owner, module in zip(owners, experts, strict=True):
            owner._modules["experts"] = module
            move_to_huge_pages(module)


def run_from_host(stock: Any, config: RuntimeConfig) -> None:
    """Have the model's own modules copy chosen ones of these experts to where their input is."""
    for i in layers_of(stock, config):
        mlp = stock.model.layers[i].mlp
        if not isinstance(mlp.experts, PackedExperts):
            mlp.experts = PackedExperts(mlp.experts)
