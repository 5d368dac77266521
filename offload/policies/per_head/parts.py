"""What `per_head` keeps of a layer, and what a GPU can do for it: its members', of their heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offload.selection.device_support import DeviceCodes
from offload.selection.head_roles import BoolArray
from offload.selection.layer_state import State
from offload.selection.members import MembersDevice, MembersState, lie_together, of_member
from offload.selection.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

REST, RETRIEVAL = 0, 1  # of `members`
_NAMES = ("rest", "retrieval")  # of their arrays


class PerHeadState(MembersState):
    """The arrays of each member, of its own heads."""

    policy: Policy

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, dict(zip(_NAMES, policy.members, strict=False)))

    def heads_of(
        self, layer_idx: int, num_layers: int, num_kv_heads: int
    ) -> dict[str, npt.NDArray[np.int64]]:
        of_layer = _members_of(self.policy, num_layers, num_kv_heads)[layer_idx]
        return {
            name: np.flatnonzero(of_layer == index)
            for index, (name, member) in enumerate(self.members.items())
            if member.state.has_arrays and index in of_layer
        }

    def read_bytes(self, **sizes: Any) -> tuple[float, bool]:
        """Bytes that are read for a head that `rest` selects for."""
        return self.policy.members[REST].state.read_bytes(**sizes)


class PerHeadDevice(MembersDevice):
    """What it can do for the members."""

    policy: Policy

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

    def copied_heads(self, num_layers: int, num_kv_heads: int) -> int:
        """Heads that are copied for a member whose heads do not lie together."""
        heads = [
            own
            for layer_idx in range(num_layers)
            for own in self._state.heads_of(layer_idx, num_layers, num_kv_heads).values()
        ]
        return max((len(x) for x in heads if not lie_together(x)), default=0)


def _members_of(policy: Policy, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
    members = policy.unit_members(num_layers, num_units)
    assert members is not None
    return members
