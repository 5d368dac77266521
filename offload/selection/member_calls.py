"""How a policy that is made of others calls their callbacks: each finds the context as if alone."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.selection.callback import (
    Callback,
    callback,
    read_context,
    run_callback,
    view_float64,
)
from offload.selection.layouts import NumberLayout, StateLayout, reader

# Of a member, one after the other before their numbers: addresses, 0 where there is none, and where
# its arrays and numbers begin.
CALLBACKS = ("prepare", "propose", "select", "observe", "append")
MEMBER = (*CALLBACKS, "first_array", "first_number")
_MEMBER_BYTES = 8 * len(MEMBER)
_read_member = reader(MEMBER, np.float64)


class MemberNumbers(NumberLayout):
    """What callbacks call for each of a policy's `parts`, then the numbers of these.

    Args:
        own: arrays that the policy has before theirs.
    """

    def __init__(self, own: StateLayout) -> None:
        self._own = own

    def values(self, policy: Any) -> list[float]:
        """Addresses are exact: they have less than 53 bits."""
        callers: list[float] = []
        numbers: list[float] = []
        first_array = len(self._own)
        for member in policy.parts.values():
            callbacks = (getattr(member, name) for name in CALLBACKS)
            callers += [0.0 if x is None else float(x.address) for x in callbacks]
            callers += [first_array, len(policy.parts) * len(MEMBER) + len(numbers)]
            first_array += 0 if member.state.layout is None else len(member.state.layout)
            numbers += [] if member.number_layout is None else member.number_layout.values(member)
        return callers + numbers


@numba.njit(inline="always")
def turn_to(ctx: Any, arrays: Any, numbers: Any, index: Any) -> Any:
    """Give the context the arrays and numbers of a member; what there is of it."""
    member = _read_member(numbers + _MEMBER_BYTES * index)
    ctx.arrays = arrays + 8 * np.int64(member.first_array)
    ctx.parameters = numbers + 8 * np.int64(member.first_number)
    return member


@numba.njit(inline="always")
def turn_back(ctx: Any, arrays: Any, numbers: Any) -> None:
    ctx.arrays, ctx.parameters = arrays, numbers


def of_members(name: str, num_members: int) -> Callback:
    """What runs the callback of this name, of each member that has one."""
    place = MEMBER.index(name)

    @callback
    def run(pointer: Any) -> None:
        ctx = read_context(pointer)
        arrays, numbers = ctx.arrays, ctx.parameters
        for index in range(num_members):
            turn_to(ctx, arrays, numbers, index)
            address = view_float64(numbers, len(MEMBER), index)[place]
            if address != 0.0:
                run_callback(pointer, np.int64(address))
        turn_back(ctx, arrays, numbers)

    return run
