"""Experts that stay in the CPU's memory and run there, while a GPU computes the rest of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
    asked, model_type = config.host_experts, str(checkpoint.config["model_type"])
    if asked == 0:
        return config
    sizes = _expert_bytes(checkpoint, config)
    check_host_experts(asked, len(sizes), model_type)
    if asked != "auto":
        return config
    device = torch.device(config.device)
    if device.type == "cpu" or not sizes:
        return replace(config, host_experts=0)
    limit = config.max_memory.get(device.index or 0)
    if limit is None:
        limit = int(torch.cuda.mem_get_info(device)[0])
    skeleton = generic_skeleton(checkpoint, config.dtype, config.packing)
    needed = sum(parameter_bytes(*skeleton).values())
    needed += room_beside(
        checkpoint.shape, checkpoint.loaded_dtype(config.dtype), config.prefill_slice_tokens
    )
    count = experts_beyond([*sizes.values()], needed, limit)
    if count:
        logger.info(
            "host_experts: the GPU may have %s and would need %s: experts of %d of %d layers stay "
            "on the host and run there",
            format_bytes(limit),
            format_bytes(needed),
            count,
            len(sizes),
        )
    return replace(config, host_experts=count)


def room_beside(shape: ModelShape, dtype: torch.dtype, slice_tokens: int) -> int:
    """Bytes of a GPU that "auto" leaves beside the weights: a slice of a prompt, and to spare."""
    tokens = min(slice_tokens, shape.max_context or slice_tokens)
    return SPARE_BYTES + prefill_bytes(Workload(shape, Full(), tokens, dtype=dtype), tokens)


def host_expert_bytes(checkpoint: Checkpoint, config: RuntimeConfig) -> int:
    """Bytes of weights that stay on the host of a model whose others go to a GPU."""
    if config.device == "cpu" or not isinstance(config.host_experts, int):
        return 0
    if not config.host_experts:
        return 0
    return sum([*_expert_bytes(checkpoint, config).values()][: config.host_experts])


def _expert_bytes(checkpoint: Checkpoint, config: RuntimeConfig) -> dict[int, int]:
    if not checkpoint.shape.num_experts:
        return {}
    return expert_bytes(*generic_skeleton(checkpoint, config.dtype, config.packing))


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
