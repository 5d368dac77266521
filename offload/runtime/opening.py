"""From a name and options to what a model runs with: each thing is resolved once, here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.loading.checkpoint import Checkpoint
from offload.models import ModelShape, lean_model_maker
from offload.policies import Policy
from offload.ranks.group import TensorParallel
from offload.ranks.shares import head_ranges
from offload.runtime.budgets import device_kv_budget_bytes, kv_budget_bytes, weight_bytes_of
from offload.runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from offload.runtime.config import RuntimeConfig
from offload.loading.names import HubOptions, resolve_folder
from offload.models.rank_part import keep_own_weights


def resolve_folder_once(
    name_or_path: str | Path, hub: HubOptions, ranks: TensorParallel | None
) -> Path:
    """`resolve_folder`; with ranks by one of them, which may have to download or to convert."""
    if ranks is None:
        return resolve_folder(name_or_path, hub)
    folder: Path = ranks.once(lambda: resolve_folder(name_or_path, hub))
    return folder


def check_before_loading(
    checkpoint: Checkpoint, config: RuntimeConfig, ranks: TensorParallel | None
) -> None:
    """Refuse, before any weight is read, what would not fit.

    Raises:
        HostBudgetError, DeviceMemoryError: weights beyond max_memory. What one rank's GPU will hold
            is known when it has its part (`keep_own_part`).
        ValueError, NotImplementedError: a policy that is not for this model, or not for ranks; more
            ranks than KV heads.
    """
    weight_bytes = checkpoint.weight_bytes(config.dtype)
    kv_budget_bytes(config, weight_bytes, loaded=False)
    shape = checkpoint.shape
    config.policy.check_model(**shape.heads)
    if config.placement is not None:
        config.placement.check_model(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads)
    if ranks is None:
        device_kv_budget_bytes(config, weight_bytes)
        return
    rank_policy(config.policy, ranks, shape)


def with_calibrated_policy(
    stock: Any, config: RuntimeConfig, folder: Path, ranks: TensorParallel | None = None
) -> RuntimeConfig:
    """The config, its policy with what it needs to learn from the model's attention first.

    With ranks one of them learns; the model is still whole.
    """
    if ranks is not None:
        return replace(
            config,
            policy=ranks.once(lambda: with_calibrated_policy(stock, config, folder).policy),
        )
    from transformers import AutoTokenizer

    if config.policy.name != "lychee_decode":
        return config
    from offload.policies.lychee_decode.calibration import with_calibrated_roles

    policy = with_calibrated_roles(
        config.policy,
        lean_model_maker(stock.config.model_type)(stock),
        model_type=stock.config.model_type,
        load_tokenizer=lambda: AutoTokenizer.from_pretrained(folder),
    )
    return replace(config, policy=policy)


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
    return policy.of_heads(
        head_ranges(shape.num_kv_heads, ranks.world_size)[ranks.rank],
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


def rank_config(config: RuntimeConfig, ranks: TensorParallel) -> RuntimeConfig:
    """What `config` means for one rank: its GPU, and of max_memory what concerns it.

    Without a GPU its step runs inline: the native decoder runs all layers in one call, and has no
    place to wait for other ranks.
    """
    if config.device == "cpu":
        return replace(config, backend="inline")
    limits = {key: n for key, n in config.max_memory.items() if key in ("cpu", ranks.rank)}
    return replace(config, device=f"cuda:{ranks.rank}", max_memory=limits)
