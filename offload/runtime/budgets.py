"""What a memory budget leaves for the KV cache beside the weights."""

from __future__ import annotations

from typing import Any

import torch

from offload.loading.checkpoint import Checkpoint
from offload.loading.generic_packing import parameter_bytes
from offload.loading.packed_bytes import checkpoint_packed_bytes
from offload.loading.stock_model import generic_skeleton
from offload.models import has_other_matrices
from offload.ranks.group import TensorParallel
from offload.runtime.config import RuntimeConfig
from offload.system.errors import DeviceMemoryError, HostBudgetError
from offload.system.memory import format_bytes, host_memory, worker_threads


def device_kv_budget_bytes(config: RuntimeConfig, weight_bytes: int) -> int | None:
    """What max_memory leaves on the GPU beside the weights; None: as much as it has.

    Raises:
        DeviceMemoryError: if the weights alone do not fit.
    """
    device = torch.device(config.device)
    limit = config.max_memory.get(device.index or 0)
    if device.type == "cpu" or limit is None:
        return None
    if weight_bytes > limit:
        raise DeviceMemoryError(
            f"the weights need {format_bytes(weight_bytes)}, but max_memory[{device.index or 0}] "
            f"is {format_bytes(limit)}; raise it, or choose a smaller dtype or model, or give "
            'host_experts="auto" for a MoE model'
        )
    return limit - weight_bytes


def kv_budget_bytes(
    config: RuntimeConfig, weight_bytes: int, *, loaded: bool, host_bytes: int = 0
) -> int:
    """What is left for the KV store, before or after the weights are loaded.

    Args:
        host_bytes: of a model on a GPU, of experts that stay on the host.

    Raises:
        HostBudgetError: if the weights alone do not fit.
    """
    if config.device != "cpu":
        weight_bytes = host_bytes
    limit, source = config.max_memory.get("cpu"), "max_memory['cpu'] is"
    if limit is None:
        limit = host_memory().model_bytes(weight_bytes if loaded else 0)
        source = "the host memory for them and the KV cache that this process may use is"
    if weight_bytes > limit:
        raise HostBudgetError(
            f"the weights need {format_bytes(weight_bytes)}, but {source} {format_bytes(limit)}; "
            "raise it, or choose a smaller dtype or model"
        )
    return limit - weight_bytes


def rank_kv_budget_bytes(
    config: RuntimeConfig,
    weight_bytes: int,
    num_kv_heads: int,
    ranks: TensorParallel | None,
    host_bytes: int = 0,
) -> int:
    """`kv_budget_bytes` of loaded weights, or of what all ranks have loaded this rank's part.

    The parts are as the KV heads, so that all ranks have room for the same number of tokens: where
    one refuses a sequence, all do.

    Args:
        weight_bytes, num_kv_heads: of this rank.
    """
    if ranks is None:
        return kv_budget_bytes(config, weight_bytes, loaded=True, host_bytes=host_bytes)
    all_bytes, all_heads = ranks.total(weight_bytes, num_kv_heads)
    budget = ranks.least(kv_budget_bytes(config, all_bytes, loaded=True))
    return budget // all_heads * num_kv_heads


def pool_threads(config: RuntimeConfig, ranks: TensorParallel | None = None) -> int:
    """Threads of the worker pool; of ranks, of this one's."""
    num_cpus = None if ranks is None else ranks.num_cpus
    with_gpu = torch.device(config.device).type == "cuda"
    return worker_threads(config.num_threads, with_gpu=with_gpu, num_cpus=num_cpus)


def weight_bytes_before_loading(checkpoint: Checkpoint, config: RuntimeConfig) -> int:
    """Bytes that the weights of a checkpoint will have in memory: of packed ones, as packed."""
    if not config.packing:
        return checkpoint.weight_bytes(config.dtype)
    if has_other_matrices(checkpoint.config) or checkpoint.packs_as_generic:
        skeleton = generic_skeleton(checkpoint, config.dtype, config.packing, is_lean=True)
        return sum(parameter_bytes(*skeleton).values())
    dtype = checkpoint.loaded_dtype(config.dtype)
    return checkpoint_packed_bytes(checkpoint, dtype, config.packing)


def weight_bytes_of(stock: Any, on: str | None = None) -> int:
    """Bytes of all weights, or of those on one type of device; tied ones count once."""
    weights = {
        weight.data_ptr(): weight.nbytes
        for weight in stock.parameters()
        if on in (None, weight.device.type)
    }
    return sum(weights.values())
