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
    expert_bytes,
    experts_beyond,
    parameter_bytes,
)
from offload.loading.huge_pages import move_to_huge_pages
from offload.loading.stock_model import generic_skeleton
from offload.models import ModelShape
from offload.models.packed_experts import PackedExperts
from offload.planning.placement_bytes import prefill_bytes
from offload.planning.workload import Workload
from offload.policies.full import Full
from offload.runtime.config import RuntimeConfig
from offload.system.memory import format_bytes

logger = logging.getLogger(__name__)


def with_host_experts(checkpoint: Checkpoint, config: RuntimeConfig) -> RuntimeConfig:
    """The config with a number for `host_experts`, which is 0 for a model without experts under
    "auto"; before anything is allocated.

    Raises:
        ValueError: more layers than have experts.
    """
    if not config.host_experts:
        return config
    shape, dtype = checkpoint.shape, checkpoint.loaded_dtype(config.dtype)
    sizes, weight_bytes = list[int](), 0
    if shape.num_experts:
        skeleton = generic_skeleton(checkpoint, config.dtype, config.packing)
        sizes, weight_bytes = [*expert_bytes(*skeleton).values()], total_bytes(*skeleton)
    return with_number(
        config,
        checkpoint.config["model_type"],
        sizes,
        lambda: weight_bytes + room_beside(shape, dtype, config.prefill_slice_tokens),
    )


def with_number(
    config: RuntimeConfig, model_type: str, sizes: Sequence[int], needed: Callable[[], int]
) -> RuntimeConfig:
    """`with_host_experts` of a model whose layers with experts have these bytes of them.

    Args:
        needed: bytes that a GPU would need with all of them.
    """
    check_host_experts(config.host_experts, len(sizes), model_type)
    if config.host_experts != "auto":
        return config
    device = torch.device(config.device)
    if device.type == "cpu" or not sizes:
        return replace(config, host_experts=0)
    limit = config.max_memory.get(device.index or 0)
    if limit is None:
        limit = int(torch.cuda.mem_get_info(device)[0])
    count = experts_beyond(sizes, needed(), limit)
    if count:
        logger.info(
            "host_experts: the GPU may have %s and would need %s: experts of %d of %d layers stay "
            "on the host and run there",
            format_bytes(limit),
            format_bytes(needed()),
            count,
            len(sizes),
        )
    return replace(config, host_experts=count)


def total_bytes(empty: Any, kept: Mapping[str, str]) -> int:
    """Of all parameters of a `skeleton`."""
    return sum(parameter_bytes(empty, kept).values())


def room_beside(shape: ModelShape, dtype: torch.dtype, slice_tokens: int) -> int:
    """Bytes of a GPU that "auto" leaves beside the weights: a slice of a prompt, and to spare."""
    tokens = min(slice_tokens, shape.max_context or slice_tokens)
    return SPARE_BYTES + prefill_bytes(Workload(shape, Full(), tokens, dtype=dtype), tokens)


def host_expert_bytes(checkpoint: Checkpoint, config: RuntimeConfig) -> int:
    """Bytes of weights that stay on the host of a model whose others go to a GPU."""
    if not config.host_experts or not checkpoint.shape.num_experts:
        return 0
    skeleton = generic_skeleton(checkpoint, config.dtype, config.packing)
    return left_out_bytes([*expert_bytes(*skeleton).values()], config)


def left_out_bytes(sizes: Sequence[int], config: RuntimeConfig) -> int:
    """Of these sizes of layers' experts, bytes that a GPU does not get."""
    if config.device == "cpu" or not isinstance(config.host_experts, int):
        return 0
    return sum(sizes[: config.host_experts])


def layers_of(stock: Any, config: RuntimeConfig) -> list[int]:
    """The first `host_experts` layers that have experts."""
    count = config.host_experts if isinstance(config.host_experts, int) else 0
    if not count:
        return []
    layers = enumerate(stock.model.layers)
    return [i for i, layer in layers if hasattr(layer.mlp, "experts")][:count]


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
