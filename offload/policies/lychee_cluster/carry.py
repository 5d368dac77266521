"""What had the most attention in a step: candidates of the next, too.

Steps of even and of odd kv_len have rows of their own: one that fails leaves what it has read.
"""

from __future__ import annotations

from typing import Any

import numba

from offload.policies.callback import top_k, view_int32
from offload.policies.lychee_cluster.chunks import MAX_CHUNK_TOKENS
from offload.policies.lychee_cluster.layout import read_state


@numba.njit(cache=True)
def add_carried(ctx: Any, header: Any, scratch: Any, count: int) -> int:
    """Put what the step before carried among the `count` candidates; how many there are then."""
    length = 2 + header.carried_tokens
    at = read_state(ctx.arrays).carried + 4 * 2 * length * ctx.unit
    before = view_int32(at, length, (ctx.kv_len - 1) & 1)
    if before[0] != ctx.kv_len - 1:
        return count
    # Those that are no candidates yet; then both lists from behind, into one.
    tokens = view_int32(scratch.candidates, count + before[1])
    new = view_int32(scratch.picked, before[1])
    added, i = 0, 0
    for k in range(before[1]):
        token = before[2 + k]
        while i < count and tokens[i] < token:
            i += 1
        if i == count or tokens[i] != token:
            new[added] = token
            added += 1
    i, k = count - 1, added - 1
    while k >= 0:
        if i >= 0 and tokens[i] > new[k]:
            tokens[i + k + 1] = tokens[i]
            i -= 1
        else:
            tokens[i + k + 1] = new[k]
            k -= 1
    return count + added


@numba.njit
def carry(pointer: Any, ctx: Any, header: Any, indexed: int) -> None:
    """Note the heaviest candidates for the next step."""
    length = 2 + header.carried_tokens
    state = read_state(ctx.arrays)
    notes = view_int32(state.carried + 4 * 2 * length * ctx.unit, length, ctx.kv_len & 1)
    longest = header.candidate_capacity + MAX_CHUNK_TOKENS
    candidates = view_int32(state.candidates, longest, ctx.unit)
    address = notes.ctypes.data + 8
    count = top_k(pointer, ctx.top_k, ctx.importance, indexed, header.carried_tokens, address)
    for i in range(count):
        notes[2 + i] = candidates[notes[2 + i]]
    notes[0], notes[1] = ctx.kv_len, max(0, count)
    ctx.bytes_touched += 8 * count
