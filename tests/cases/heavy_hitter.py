"""A stateful policy for the tests: tokens that were attended before are preferred.

It uses everything the interface has: arrays, all four callbacks, and both primitives. `Simulation`
is the same policy in float64 NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from cases import kernel_references as reference

from offload.policies.base import SparsePolicy
from offload.selection.callback import (
    Callback,
    callback,
    offset_floats,
    read_context,
    score_tokens,
    top_k,
    view_float32,
    view_int32,
)
from offload.selection.layer_state import BuildContext, LayerState, State
from offload.selection.layouts import StateLayout

MAX_TOKENS = 512
MAX_GROUP = 4
LOG_ENTRIES = (
    64  # int32 of a unit: prepared, selected, observed, appended, then kv_len of each append
)
STATE = StateLayout(attended=np.float32, log=np.int32, tokens=np.int32, scores=np.float32)
read_state = STATE.read


@callback
def prepare(pointer: Any) -> None:
    ctx = read_context(pointer)
    log = view_int32(read_state(ctx.arrays).log, LOG_ENTRIES, ctx.unit)
    log[0] += 1 if ctx.query == 0 else 1000  # the query is not known yet


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    n = ctx.last - ctx.first
    state = read_state(ctx.arrays)
    tokens_at = offset_floats(state.tokens, ctx.unit * MAX_TOKENS)
    tokens = view_int32(tokens_at, n)
    scores_at = offset_floats(state.scores, ctx.unit * MAX_TOKENS * MAX_GROUP)
    for i in range(n):
        tokens[i] = ctx.first + i
    score_tokens(pointer, ctx.score_tokens, tokens_at, n, scores_at)
    scores = view_float32(scores_at, ctx.group_size * n)
    attended = view_float32(read_state(ctx.arrays).attended, MAX_TOKENS, ctx.unit)
    for i in range(n):
        total = 0.0
        for g in range(ctx.group_size):
            total += scores[g * n + i]
        scores[i] = attended[ctx.first + i] + 0.01 * total
    count = top_k(pointer, ctx.top_k, scores_at, n, ctx.budget_tokens, ctx.indices)
    indices = view_int32(ctx.indices, max(count, 0))
    for i in range(len(indices)):
        indices[i] += ctx.first
    view_int32(read_state(ctx.arrays).log, LOG_ENTRIES, ctx.unit)[1] += 1
    return count


@callback
def observe(pointer: Any) -> None:
    ctx = read_context(pointer)
    n = ctx.num_indices
    indices = view_int32(ctx.indices, n)
    weights = view_float32(ctx.weights, ctx.group_size * n)
    attended = view_float32(read_state(ctx.arrays).attended, MAX_TOKENS, ctx.unit)
    for g in range(ctx.group_size):
        for i in range(n):
            attended[indices[i]] += weights[g * n + i]
    view_int32(read_state(ctx.arrays).log, LOG_ENTRIES, ctx.unit)[2] += 1


@callback
def append(pointer: Any) -> None:
    ctx = read_context(pointer)
    log = view_int32(read_state(ctx.arrays).log, LOG_ENTRIES, ctx.unit)
    log[4 + log[3]] = ctx.kv_len
    log[3] += 1


class HeavyHitterState(LayerState):
    layout = STATE

    def build(self, context: BuildContext) -> State:
        self.policy.built.append((context.layer_idx, tuple(context.keys.shape)))
        num_units = self.policy.num_units
        return {
            "attended": np.zeros((num_units, MAX_TOKENS), np.float32),
            "log": np.zeros((num_units, LOG_ENTRIES), np.int32),
            "tokens": np.zeros((num_units, MAX_TOKENS), np.int32),
            "scores": np.zeros((num_units, MAX_GROUP, MAX_TOKENS), np.float32),
        }


@dataclass(frozen=True)
class HeavyHitter(SparsePolicy):
    name: ClassVar[str] = "heavy_hitter"
    prepare: ClassVar[Callback | None] = prepare
    select: ClassVar[Callback | None] = select
    observe: ClassVar[Callback | None] = observe
    append: ClassVar[Callback | None] = append
    state = cached_property(HeavyHitterState)
    num_units: int = 2
    built: list[tuple[int, tuple[int, ...]]] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class HeavyHitterPerQueryHead(HeavyHitter):
    per_query_head: ClassVar[bool] = True


class Simulation:
    """One (sequence, layer) of a HeavyHitter in float64."""

    def __init__(self, policy: HeavyHitter) -> None:
        self.policy = policy
        self.attended = np.zeros((policy.num_units, MAX_TOKENS))

    def step(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray):
        """o, lse and selection of one query [num_qo_heads, head_dim] over keys [kv_heads, n, d]."""
        policy, kv_len = self.policy, keys.shape[1]
        scale = query.shape[1] ** -0.5
        group = len(query) // policy.num_units
        first, last = policy.sink_tokens, kv_len - policy.recent_tokens
        sinks, recent = np.arange(first), np.arange(last, kv_len)
        selection = []
        for unit in range(policy.num_units):
            kv_head = unit * len(keys) // policy.num_units
            scores = scale * query[unit * group : (unit + 1) * group] @ keys[kv_head].T
            wanted = self.attended[unit, first:last] + 0.01 * scores.sum(0)[first:last]
            budget = policy.budget_tokens - len(sinks) - len(recent)
            chosen = first + reference.top_k(wanted, budget)
            selection.append(np.concatenate([sinks, chosen, recent]))
        out, lse, weights = reference.attention(
            query, keys, values, sm_scale=scale, selection=selection
        )
        for head, weight in enumerate(weights):
            self.attended[head // group, selection[head // group]] += weight
        return out, lse, selection
