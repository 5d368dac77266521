"""What a union keeps of a layer, and how its callbacks find those of its members."""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.policies.layouts import NumberLayout, StateLayout, reader

NAMES = ("first", "second")  # of the members
OWN = StateLayout(
    # [units, FOUND]: of each member the address of its candidates and their number; the room for
    # those of both.
    found=np.int64,
    candidates=np.int32,  # [units, room]
)
FOUND = 5
read_own = OWN.read
# Of a member, one after the other before their numbers: addresses, 0 where there is none, and where
# its arrays and numbers begin.
MEMBER = ("prepare", "propose", "select", "observe", "append", "first_array", "first_number")
read_member = reader(MEMBER, np.float64)


class UnionNumbers(NumberLayout):
    """What its callbacks call for each member, then the members' numbers."""

    def __init__(self) -> None:
        """Nothing reads them by names but `read_member`."""

    def values(self, policy: Any) -> list[float]:
        """Addresses are exact: they have less than 53 bits."""
        callers: list[float] = []
        numbers: list[float] = []
        first_array = len(OWN)
        for member in (policy.first, policy.second):
            callers += [
                0.0 if callback is None else float(callback.address)
                for callback in (getattr(member, name) for name in MEMBER[:5])
            ]
            callers += [first_array, len(NAMES) * len(MEMBER) + len(numbers)]
            first_array += 0 if member.state.layout is None else len(member.state.layout)
            numbers += [] if member.number_layout is None else member.number_layout.values(member)
        return callers + numbers
