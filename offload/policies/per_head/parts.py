"""What `per_head` keeps of a layer, and what a GPU can do for it: its members', of their heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offload.policies.base import Policy
from offload.policies.device_support import DeviceBuild, DeviceCodes, DeviceSupport
from offload.policies.head_roles import BoolArray
from offload.policies.layer_state import BuildContext, LayerState, State, StateShape
from offload.policies.members import MemberLayouts, context_of, joined, lie_together, of_member
from offload.policies.revised import Revised

if TYPE_CHECKING:
    from torch import Tensor

REST, RETRIEVAL = 0, 1  # of `members`
_NAMES = ("rest", "retrieval")  # of their arrays


class PerHeadState(LayerState):
    """The arrays of each member, of its own heads."""

    policy: Policy

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        layouts = MemberLayouts(dict(zip(_NAMES, policy.members, strict=False)))
        states = [member.state for member in policy.members]
        self.layout = layouts if len(layouts) else None
        self.observed_queries = max(state.observed_queries for state in states)
        self.reads_text = any(state.reads_text for state in states)

    def build(self, context: BuildContext) -> State:
        """The arrays of each member, of its own heads."""
        policy, members = self.policy, self.policy.members
        built = {
            i: members[i].state.build(_part(policy, context, i)) for i in _building(policy, context)
        }
        return _joined(built)

    def num_bytes(self, shape: StateShape) -> int:
        """Bytes that the members keep, each of its own heads."""
        group_size = shape.num_qo_heads // shape.num_kv_heads
        members = _members_of(self.policy, shape.num_layers, shape.num_kv_heads)[shape.layer_idx]
        num_bytes = 0
        for index, member in enumerate(self.policy.members):
            count = int((members == index).sum())
            if count and member.state.has_arrays:
                own = replace(shape, num_kv_heads=count, num_qo_heads=count * group_size)
                num_bytes += member.state.num_bytes(own)
        return num_bytes

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int) -> State:
        return _joined(
            {
                i: self.policy.members[i].state.grow(layer_idx, own, capacity_tokens)
                for i, own in self._states(arrays).items()
            }
        )

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        states = self._states(arrays)
        return all(
            self.policy.members[i].state.truncate(layer_idx, x, kv_len) for i, x in states.items()
        )

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        states = self._states(arrays)
        return all(
            self.policy.members[i].state.rewind(layer_idx, x, kv_len) for i, x in states.items()
        )

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        of_layer = _members_of(self.policy, revised.num_layers, revised.num_kv_heads)[layer_idx]
        return all(
            self.policy.members[i].state.revise(
                layer_idx, x, revised.of_heads(np.flatnonzero(of_layer == i))
            )
            for i, x in self._states(arrays).items()
        )

    def read_bytes(self, **sizes: Any) -> tuple[float, bool]:
        """Bytes that are read for a head that `rest` selects for."""
        return self.policy.members[REST].state.read_bytes(**sizes)

    def _states(self, arrays: State) -> dict[int, State]:
        states = {i: of_member(arrays, _NAMES[i]) for i in range(len(self.policy.members))}
        return {i: own for i, own in states.items() if own}


class PerHeadDevice(DeviceSupport):
    """What it can do for the members."""

    policy: Policy

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        members = policy.members
        self.builds = all(x.device.builds or not x.state.has_arrays for x in members)

    def whole(self, num_layers: int, num_units: int) -> BoolArray:
        """The retrieval heads: looking at everything is what they are for."""
        return np.asarray(_members_of(self.policy, num_layers, num_units) == RETRIEVAL)

    def codes(self, num_layers: int, num_units: int) -> DeviceCodes | None:
        """Codes of the retrieval heads, if their policy has codes."""
        members = self.policy.members
        if len(members) <= RETRIEVAL:
            return None
        codes = members[RETRIEVAL].device.codes(num_layers, num_units)
        return codes and replace(codes, heads=self.whole(num_layers, num_units))

    def code_state(self, arrays: State, kv_len: int, load_keys: Callable[[int], Tensor]) -> State:
        own = of_member(arrays, _NAMES[RETRIEVAL])
        return self.policy.members[RETRIEVAL].device.code_state(own, kv_len, load_keys)

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same; what is copied of heads goes before the next member's are."""
        policy, members = self.policy, self.policy.members
        finishing = {
            i: members[i].device.build(_part(policy, context, i))
            for i in _building(policy, context)
        }
        return lambda: _joined({i: finish() for i, finish in finishing.items()})

    def copied_heads(self, num_layers: int, num_kv_heads: int) -> int:
        """Heads that are copied for a member whose heads do not lie together."""
        members = _members_of(self.policy, num_layers, num_kv_heads)
        heads = [
            np.flatnonzero(of_layer == index)
            for of_layer in members
            for index, member in enumerate(self.policy.members)
            if member.state.has_arrays
        ]
        return max((len(x) for x in heads if not lie_together(x)), default=0)

    def warm_up_kernels(self, keys: Tensor) -> None:
        for member in self.policy.members:
            member.device.warm_up_kernels(keys)


def _building(policy: Policy, context: BuildContext) -> list[int]:
    """Members with arrays in this layer."""
    of_layer = _members_of(policy, context.num_layers, len(context.keys))[context.layer_idx]
    return [i for i, x in enumerate(policy.members) if x.state.has_arrays and i in of_layer]


def _part(policy: Policy, context: BuildContext, index: int) -> BuildContext:
    """What a member builds from in this layer."""
    of_layer = _members_of(policy, context.num_layers, len(context.keys))[context.layer_idx]
    return context_of(context, np.flatnonzero(of_layer == index), policy.members[index])


def _members_of(policy: Policy, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
    members = policy.unit_members(num_layers, num_units)
    assert members is not None
    return members


def _joined(states: dict[int, State]) -> State:
    return joined({_NAMES[i]: own for i, own in states.items()})
