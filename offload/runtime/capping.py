"""Caps of a step as tokens, when a model is loaded: see `offload.planning.step_cap`."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from offload.kv.format import KVFormat
from offload.loading.checkpoint import Checkpoint
from offload.planning.profile import cached_profile
from offload.planning.step_cap import StepPredictor, has_step_cap, in_tokens, step_predictor
from offload.policies import Policy
from offload.ranks.group import TensorParallel
from offload.runtime.budgets import (
    kv_budget_bytes,
    pool_threads,
    weight_bytes_before_loading,
)
from offload.runtime.config import RuntimeConfig

logger = logging.getLogger(__name__)


def with_cap_in_tokens(
    checkpoint: Checkpoint, config: RuntimeConfig, ranks: TensorParallel | None
) -> RuntimeConfig:
    """The config, its policy's cap of a step turned into tokens; before any weight is read.

    Microseconds are those of one sequence, as long as the model and the host's budget allow, by the
    profile that `offload plan` keeps of this machine: loading does not wait for a measurement.

    Raises:
        ValueError: the cap cannot hold, or nothing was measured that predicts a step.
        NotImplementedError: microseconds of ranks, or of the GPU's code path on the CPU.
    """
    policy, shape = config.policy, checkpoint.shape
    if not has_step_cap(policy):
        return config
    weight_bytes = weight_bytes_before_loading(checkpoint, config)
    dtype = checkpoint.loaded_dtype(config.dtype)
    of_rows = KVFormat.of(config.kv_dtype, dtype)

    def predict() -> StepPredictor:
        if ranks is not None or config.backend == "inline":
            raise NotImplementedError(
                f"{policy.step_cap}: nothing predicts steps of several ranks, or with "
                "backend='inline'; give max_tokens"
            )
        device = torch.device(config.device)
        threads = pool_threads(config)
        if not shape.max_context:
            raise ValueError(
                f"{policy.step_cap} is of steps at the longest context, which the model's "
                "config.json does not name (max_position_embeddings); give max_tokens"
            )
        token_bytes = of_rows.token_bytes(**shape.kv_heads)
        room = kv_budget_bytes(config, weight_bytes, loaded=False)
        kv_len = min(shape.max_context, max(config.page_tokens, room // token_bytes))
        profile = cached_profile(device, threads)
        again = "" if profile is None or profile.measured_threads is None else " --remeasure"
        to_measure = (
            f"run `offload plan --context {kv_len} --dtype {str(dtype).removeprefix('torch.')} "
            f"--threads {threads} --device {config.device}{again}` with this model and policy once"
        )
        if profile is None:
            raise ValueError(
                f"{policy.step_cap} is of predicted steps, but this machine was not measured; "
                f"{to_measure}, or give max_tokens"
            )
        predicted = step_predictor(
            policy,
            shape,
            dtype,
            kv_len=kv_len,
            profile=profile,
            placement=config.placement,
            on_gpu=device.type == "cuda",
            page_tokens=config.page_tokens,
            kv_dtype=config.kv_dtype,
        )
        logger.info("%s: of a step of %s", policy.step_cap, predicted.sequences)
        if assumed := predicted(policy).assumed:
            logger.warning(
                "%s is predicted with less than was measured (%s); %s",
                *(policy.step_cap, "; ".join(assumed), to_measure),
            )
        return predicted

    capped: Policy = in_tokens(policy, shape, of_rows.row_bytes(shape.head_dim), predict)
    logger.info("%s: max_tokens=%d", policy.step_cap, capped.budget_tokens)
    return replace(config, policy=capped)
