"""What a policy that is made of others keeps and can do on a GPU: its members', side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.selection.device_support import DeviceBuild, DeviceSupport
from offload.selection.layer_state import BuildContext, LayerState, State, StateShape
from offload.selection.layouts import StateLayout
from offload.selection.policy import Policy
from offload.selection.revised import Revised


class MemberLayouts(StateLayout):
    """The policy's own arrays, then those of members, by their names, in their order; a layer may
    lack those of a member.
    """

    def __init__(self, members: Mapping[str, Policy], own: StateLayout | None = None) -> None:
        self._own = own
        layouts = {name: member.state.layout for name, member in members.items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout is not None}

    def __len__(self) -> int:
        of_members = sum(len(layout) for layout in self._layouts.values())
        return of_members + (0 if self._own is None else len(self._own))

    def addresses(self, state: Mapping[str, npt.NDArray[Any]]) -> list[int]:
        """Addresses of all arrays; 0 for those of a member that has none."""
        found = [] if self._own is None else self._own.addresses(own_of(state))
        for member, layout in self._layouts.items():
            own = of_member(state, member)
            found += layout.addresses(own) if own else [0] * len(layout)
        return found


class MembersState(LayerState):
    """The arrays of each member, of its own heads.

    Args:
        members: by the names of their arrays.
        own: arrays that the policy has in addition to theirs.
    """

    def __init__(
        self, policy: Policy, members: Mapping[str, Policy], own: StateLayout | None = None
    ) -> None:
        super().__init__(policy)
        self.members = dict(members)
        layout = MemberLayouts(members, own)
        self.layout = layout if len(layout) else None
        states = [member.state for member in members.values()]
        self.observed_queries = max(state.observed_queries for state in states)
        self.reads_text = any(state.reads_text for state in states)
        self.catches_up = all(state.catches_up or not state.has_arrays for state in states)

    def heads_of(
        self, layer_idx: int, num_layers: int, num_kv_heads: int
    ) -> dict[str, npt.NDArray[np.int64]]:
        """The KV heads of each member that has arrays in this layer; here all of them."""
        heads = np.arange(num_kv_heads)
        return {name: heads for name, member in self.members.items() if member.state.has_arrays}

    def contexts_of(self, context: BuildContext) -> dict[str, BuildContext]:
        """What members build from in this layer."""
        heads = self.heads_of(context.layer_idx, context.num_layers, len(context.keys))
        return {name: context_of(context, own, self.members[name]) for name, own in heads.items()}

    def joined(self, states: Mapping[str, State], num_units: int, capacity_tokens: int) -> State:
        """All arrays, from those of members."""
        return joined(states)

    def build(self, context: BuildContext) -> State:
        states = {
            name: self.members[name].state.build(own)
            for name, own in self.contexts_of(context).items()
        }
        return self.joined(states, len(context.keys), context.capacity_tokens)

    def num_bytes(self, shape: StateShape) -> int:
        """Bytes that the members keep, each of its own heads."""
        group_size = shape.num_qo_heads // shape.num_kv_heads
        heads = self.heads_of(shape.layer_idx, shape.num_layers, shape.num_kv_heads)
        return sum(
            self.members[name].state.num_bytes(
                replace(shape, num_kv_heads=len(own), num_qo_heads=len(own) * group_size)
            )
            for name, own in heads.items()
        )

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        """With its own arrays as they are."""
        grown = {
            name: self.members[name].state.grow(layer_idx, own, capacity_tokens, pool)
            for name, own in self._states(arrays).items()
        }
        return own_of(arrays) | joined(grown)

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        states = self._states(arrays).items()
        return all(self.members[name].state.truncate(layer_idx, x, kv_len) for name, x in states)

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        states = self._states(arrays).items()
        return all(self.members[name].state.rewind(layer_idx, x, kv_len) for name, x in states)

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        heads = self.heads_of(layer_idx, revised.num_layers, revised.num_kv_heads)
        return all(
            self.members[name].state.revise(layer_idx, own, revised.of_heads(heads[name]))
            for name, own in self._states(arrays).items()
        )

    def compile_revise(self) -> None:
        for member in self.members.values():
            member.state.compile_revise()

    def _states(self, arrays: State) -> dict[str, State]:
        states = {name: of_member(arrays, name) for name in self.members}
        return {name: own for name, own in states.items() if own}


class MembersDevice(DeviceSupport):
    """What it can do for all members of a policy whose state is a `MembersState`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._state: MembersState = policy.state  # type: ignore[assignment]
        members = self._state.members.values()
        self.builds = all(x.device.builds or not x.state.has_arrays for x in members)

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same; what is copied of heads goes before the next member's are."""
        state, sizes = self._state, (len(context.keys), context.capacity_tokens)
        finishing = {
            name: state.members[name].device.build(own)
            for name, own in state.contexts_of(context).items()
        }
        return lambda: state.joined({name: finish() for name, finish in finishing.items()}, *sizes)

    def warm_up_kernels(self, keys: Tensor) -> None:
        for member in self._state.members.values():
            member.device.warm_up_kernels(keys)


def own_of(state: Mapping[str, npt.NDArray[Any]]) -> State:
    """The arrays that are no member's."""
    return {name: x for name, x in state.items() if "." not in name}


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
