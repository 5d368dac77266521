"""The arrays of policies that another is made of, side by side; those of a member by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.policies.base import Policy
from offload.policies.layer_state import BuildContext, State
from offload.policies.layouts import StateLayout


class MemberLayouts(StateLayout):
    """The arrays of members, by their names, in their order; a layer may lack those of a member."""

    def __init__(self, members: Mapping[str, Policy]) -> None:
        layouts = {name: member.state.layout for name, member in members.items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout is not None}

    def __len__(self) -> int:
        return sum(len(layout) for layout in self._layouts.values())

    def addresses(self, state: Mapping[str, npt.NDArray[Any]]) -> list[int]:
        """Addresses of all arrays; 0 for those of a member that has none."""
        found: list[int] = []
        for member, layout in self._layouts.items():
            own = of_member(state, member)
            found += layout.addresses(own) if own else [0] * len(layout)
        return found


def of_member(state: Mapping[str, npt.NDArray[Any]], member: str) -> State:
    """A member's arrays, by its own names; {} where it has none."""
    prefix = member + "."
    return {name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}


def joined(states: Mapping[str, State]) -> State:
    """The arrays of members, by their names."""
    return {f"{member}.{name}": x for member, own in states.items() for name, x in own.items()}


def lie_together(heads: npt.NDArray[np.int64]) -> bool:
    """Whether ascending heads are a slice of all, so that theirs is a view."""
    return not len(heads) or bool(heads[-1] - heads[0] + 1 == len(heads))


def context_of(context: BuildContext, heads: npt.NDArray[np.int64], member: Policy) -> BuildContext:
    """What a member builds from, of a model that has only these KV heads."""
    num_heads = len(context.keys)
    num_queries = context.queries.shape[1]
    group_size = len(context.queries) // num_heads
    groups = context.queries.view(num_heads, group_size, *context.queries.shape[1:])
    first = max(0, num_queries - member.state.observed_queries)
    return replace(
        context,
        keys=_taken(context.keys, heads),
        values=_taken(context.values, heads),
        queries=_taken(groups, heads).flatten(0, 1)[:, first:],
    )


def _taken(x: Tensor, heads: npt.NDArray[np.int64]) -> Tensor:
    """x[heads]: a view if they lie together, else a copy without a list that a device waits for."""
    if lie_together(heads):
        return x[int(heads[0]) : int(heads[-1]) + 1]
    return torch.stack([x[head] for head in heads.tolist()])
