"""What a union does in a decode step: what its members do, with their arrays and numbers.

`policy` has the idea. The weights that a member selects by are those of its own candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.selection.callback import (
    ask_callback,
    callback,
    offset_floats,
    read_context,
    top_k,
    view_float32,
    view_int32,
    view_int64,
)
from offload.selection.compiled import cached_njit
from offload.selection.layouts import StateLayout
from offload.selection.member_calls import of_members, turn_back, turn_to

OWN = StateLayout(
    # [units, FOUND]: of each member the address of its candidates and their number; the room for
    # those of both.
    found=np.int64,
    candidates=np.int32,  # [units, room]
)
FOUND = 5
read_own = OWN.read


@cached_njit()
def merge(a: Any, b: Any, out: Any) -> int:
    """Write the union of two ascending lists without repetitions; how many."""
    i = j = count = 0
    while i < len(a) and j < len(b):
        x, y = a[i], b[j]  # no branch: whose turn it is cannot be predicted
        out[count] = min(x, y)
        i += np.int64(x <= y)
        j += np.int64(y <= x)
        count += 1
    for k in range(i, len(a)):
        out[count] = a[k]
        count += 1
    for k in range(j, len(b)):
        out[count] = b[k]
        count += 1
    return count


@cached_njit()
def weights_of(own: Any, other: Any, weights: Any, out: Any) -> None:
    """Writes the weights of `own` among those of what `merge` made of `own` and `other`."""
    i = j = k = 0
    while i < len(own) and j < len(other):
        x, y = own[i], other[j]
        out[i] = weights[k]  # written over where it is the other's
        i += np.int64(x <= y)
        j += np.int64(y <= x)
        k += 1
    for rest in range(len(own) - i):
        out[i + rest] = weights[k + rest]


prepare, observe, append = (of_members(name, 2) for name in ("prepare", "observe", "append"))


@callback
def propose(pointer: Any) -> int:
    """The candidates of both, or the answer of one."""
    ctx = read_context(pointer)
    arrays, numbers = ctx.arrays, ctx.parameters
    own = read_own(arrays)
    found = view_int64(own.found, FOUND, ctx.unit)
    ctx.may_defer = 0  # both are needed at once
    ctx.ahead = 0  # together they are more than the budget, and are scored
    for index in range(2):
        member = turn_to(ctx, arrays, numbers, index)
        proposed: int = ask_callback(pointer, np.int64(member.propose))
        turn_back(ctx, arrays, numbers)
        if proposed < 0:
            return proposed
        found[2 * index], found[2 * index + 1] = ctx.candidates, proposed
    room = found[FOUND - 1]
    ctx.candidates = offset_floats(own.candidates, ctx.unit * room)
    count: int = merge(
        view_int32(found[0], found[1]),
        view_int32(found[2], found[3]),
        view_int32(ctx.candidates, room),
    )
    ctx.bytes_touched += 4 * (found[1] + found[3] + count)
    return count


@callback
def select(pointer: Any) -> int:
    """The heaviest of all. Members that select do so for what they note of it."""
    ctx = read_context(pointer)
    arrays, numbers = ctx.arrays, ctx.parameters
    own = read_own(arrays)
    found = view_int64(own.found, FOUND, ctx.unit)
    importance, count = ctx.importance, ctx.num_candidates
    # The runtime has the tokens by now: their place takes a member's weights.
    scratch = offset_floats(own.candidates, ctx.unit * found[FOUND - 1])
    noted = 0
    for index in range(2):
        member = turn_to(ctx, arrays, numbers, index)
        if member.select == 0.0 or noted < 0:
            continue
        of_it, of_other = 2 * index, 2 - 2 * index
        ctx.importance, ctx.num_candidates = scratch, found[of_it + 1]
        weights_of(
            view_int32(found[of_it], found[of_it + 1]),
            view_int32(found[of_other], found[of_other + 1]),
            view_float32(importance, count),
            view_float32(scratch, found[of_it + 1]),
        )
        noted = ask_callback(pointer, np.int64(member.select))
    turn_back(ctx, arrays, numbers)
    ctx.importance, ctx.num_candidates = importance, count
    if noted < 0:
        return -1
    chosen: int = top_k(pointer, ctx.top_k, importance, count, ctx.budget_tokens, ctx.indices)
    return chosen
