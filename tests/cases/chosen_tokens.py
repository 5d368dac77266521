"""A policy that attends to the tokens that a test gives it, and keeps the weights they got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from offload.policies.base import SparsePolicy
from offload.selection.callback import (
    Callback,
    callback,
    offset_floats,
    read_context,
    view_float32,
    view_int32,
)
from offload.selection.layer_state import BuildContext, LayerState, State
from offload.selection.layouts import StateLayout

# Of each unit: where its tokens begin and end; the tokens; the weights that they got.
STATE = StateLayout(ends=np.int32, tokens=np.int32, weights=np.float32)
read_state = STATE.read


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    ends = view_int32(offset_floats(state.ends, ctx.unit), 2)
    count = ends[1] - ends[0] - 1  # the newest is attended to anyhow
    tokens = view_int32(offset_floats(state.tokens, ends[0]), count)
    indices = view_int32(ctx.indices, count)
    for i in range(count):
        indices[i] = tokens[i]
    return count


@callback
def observe(pointer: Any) -> None:
    ctx = read_context(pointer)
    count = ctx.group_size * ctx.num_indices
    state = read_state(ctx.arrays)
    first = view_int32(offset_floats(state.ends, ctx.unit), 1)[0]
    weights = view_float32(ctx.weights, count)
    kept = view_float32(offset_floats(state.weights, first * ctx.group_size), count)
    for i in range(count):
        kept[i] = weights[i]


class ChosenState(LayerState):
    layout = STATE

    def build(self, context: BuildContext) -> State:
        selection = self.policy.selection
        counts = [len(tokens) for tokens in selection]
        group_size = len(context.queries) // len(counts)
        return {
            "ends": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "tokens": np.concatenate(selection).astype(np.int32),
            "weights": np.full(sum(counts) * group_size, np.nan, np.float32),
        }


@dataclass(frozen=True)
class Chosen(SparsePolicy):
    """`selection` has the sorted tokens of each unit, the newest last; at most the budget."""

    name: ClassVar[str] = "chosen"
    select: ClassVar[Callback | None] = select
    observe: ClassVar[Callback | None] = observe
    state = cached_property(ChosenState)
    sink_tokens: int = 0
    recent_tokens: int = 1
    selection: Sequence[np.ndarray] = field(default=(), compare=False)


@dataclass(frozen=True)
class ChosenPerQueryHead(Chosen):
    per_query_head: ClassVar[bool] = True
