"""`hard_kv`'s caps of a step, in bytes or predicted microseconds, as the tokens that they leave.

Each is turned into max_tokens once, before anything is allocated: no step waits for a budget.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.models.shape import ModelShape
from offload.planning.placement_bytes import head_state_bytes
from offload.planning.profile import MachineProfile
from offload.planning.step_time import StepModel, StepTime
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.selection.policy import SELECT
from offload.system.memory import format_bytes

if TYPE_CHECKING:
    from offload.policies import HardKV


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of the same work under a policy with any cap, each as `make_plan` does.

    Attributes:
        work: of the policy before it has a cap.
        placement: of the heads, all on the CPU where there is no GPU.
    """

    work: Workload
    profile: MachineProfile
    placement: HeadPlacement
    on_gpu: bool

    def __call__(self, policy: Policy) -> StepTime:
        work = replace(self.work, policy=policy)
        return StepModel(self.profile, work, on_gpu=self.on_gpu).step(self.placement)

    @property
    def sequences(self) -> str:
        """What a step is of, in words."""
        return _sequences(self.work.batch_size, self.work.kv_len)


def in_tokens(
    policy: Policy,
    shape: ModelShape,
    row_bytes: int,
    predict: Callable[[], StepPredictor],
    *,
    batch_size: int = 1,
) -> Policy:
    """`policy`, with the most max_tokens that a step's cap allows, if it has one.

    Args:
        row_bytes: of a key or a value of one KV head (`KVFormat`).
        predict: what `step_predictor` returns; called where microseconds are capped.
        batch_size: sequences that share the bytes; microseconds are of the predictor's.

    Raises:
        ValueError: the cap leaves less than sinks, recent window and one page, or less than other
            options ask for; names the numbers and the options.
    """
    if not has_step_cap(policy):
        return policy
    policy.inner.check_model(**shape.heads)
    if policy.max_step_us is None:
        tokens = _tokens_of_bytes(policy, shape, row_bytes, batch_size)
    else:
        tokens = _tokens_of_us(policy, policy.max_step_us, predict())
    for name in ("mean_tokens", "dense_until"):
        asked = getattr(policy, name)
        if asked is not None and asked > tokens:
            raise ValueError(
                f"{policy.step_cap} allows {tokens} tokens of a head, but {name}={asked}; raise "
                "the one or lower the other"
            )
    return policy.with_max_tokens(tokens)


def has_step_cap(policy: Policy) -> TypeGuard[HardKV]:
    """Whether a step's cap is to become one in tokens; of policies, hard_kv has that."""
    return bool(getattr(policy, "step_cap", ""))


def attended_token_bytes(policy: Policy, shape: ModelShape, row_bytes: int) -> int:
    """Keys and values of one token in every head that selects, of all layers."""
    heads = Workload(shape, policy, shape.max_context or 1).roles() == SELECT
    units = int(heads.sum()) * (shape.group_size if policy.per_query_head else 1)
    return units * 2 * row_bytes


def step_predictor(
    policy: Policy,
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    kv_len: int,
    profile: MachineProfile,
    placement: HeadPlacement | None,
    on_gpu: bool,
    batch_size: int = 1,
    page_tokens: int = 256,
    kv_dtype: str = "auto",
) -> StepPredictor:
    """What predicts steps under `policy` with any cap.

    Args:
        placement: where heads are, needed for a GPU.

    Raises:
        ValueError: a GPU without a placement, or one that is not for this model and policy.
    """
    if placement is not None:
        placement.check_model(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads)
    if not on_gpu:
        placement = HeadPlacement.filled(shape.num_layers, shape.num_kv_heads, Place.CPU)
    elif placement is None:
        raise ValueError(
            f"{getattr(policy, 'step_cap', policy.name)} cannot be predicted for a GPU before its "
            "heads have their places; give placement, which `offload plan --json` makes for "
            "max_tokens, or give max_tokens"
        )
    else:
        placement.check_policy(policy, shape.num_qo_heads, shape.windows)
    # The same for every cap: the inner policy keeps it.
    state_bytes = head_state_bytes(policy, shape, dtype, kv_len)
    work = Workload(shape, policy, kv_len, batch_size, dtype, page_tokens, state_bytes)
    work = replace(work, kv_dtype=kv_dtype)
    return StepPredictor(work, profile, placement, on_gpu)


def _tokens_of_bytes(policy: HardKV, shape: ModelShape, row_bytes: int, batch_size: int) -> int:
    token_bytes = batch_size * attended_token_bytes(policy, shape, row_bytes)
    limit, least = int(policy.max_step_bytes or 0), policy.least_max_tokens
    if not token_bytes:  # all layers are dense
        return policy.budget_tokens
    if limit < least * token_bytes:
        raise ValueError(
            f"max_step_bytes={limit} is less than {least * token_bytes} "
            f"({format_bytes(least * token_bytes)}), which the heads that select read of "
            f"{_sequences(batch_size)} for {_what_is_least(policy)}; raise it, or lower "
            "sink_tokens or recent_tokens"
        )
    return min(limit // token_bytes, policy.budget_tokens)


def _tokens_of_us(policy: HardKV, limit: float, predict: StepPredictor) -> int:
    """The most whose step is predicted to take no longer; more tokens never take less, but where
    there are so many that attention is full."""

    def holds(tokens: int) -> bool:
        return 1e3 * predict(policy.with_max_tokens(tokens)).milliseconds <= limit

    most, least = policy.budget_tokens, policy.least_max_tokens
    if holds(most):
        return most
    if not holds(least):
        us = 1e3 * predict(policy.with_max_tokens(least)).milliseconds
        raise ValueError(
            f"max_step_us={limit:g} is less than the {us:,.0f} us that a step of "
            f"{predict.sequences} is predicted to take with {_what_is_least(policy)}; raise it, "
            "let `offload plan` find max_tokens for a shorter --context and give that, or give "
            "another policy or fewer dense_layers"
        )
    return bisect_left(range(most), True, lo=least + 1, key=lambda n: not holds(n)) - 1


def _sequences(batch_size: int, kv_len: int | None = None) -> str:
    count = "one sequence" if batch_size == 1 else f"{batch_size} sequences"
    return count if kv_len is None else f"{count} of {kv_len:,} tokens"


def _what_is_least(policy: HardKV) -> str:
    more = policy.least_max_tokens - policy.sink_tokens - policy.recent_tokens
    window = f"{policy.sink_tokens} sinks, {policy.recent_tokens} recent tokens"
    what = {0: "", 1: " and one token"}
    return window + what.get(more, f" and a page of {more}")
