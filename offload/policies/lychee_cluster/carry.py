"""What had the most attention in a step: candidates of the next, too.

Steps of even and of odd kv_len have rows of their own: one that fails leaves what it has read.
"""

from __future__ import annotations

from typing import Any

import numba

from offload.policies.lychee_cluster.chunks import MAX_CHUNK_TOKENS
from offload.policies.lychee_cluster.layout import read_state
from offload.selection.callback import top_k, view_int32


@numba.njit(inline="always")
def carried_tokens(ctx: Any, header: Any) -> Any:
    """What the step before carried, ascending: int32."""
    length = 2 + header.carried_tokens
    at = read_state(ctx.arrays).carried + 4 * 2 * length * ctx.unit
    before = view_int32(at, length, (ctx.kv_len - 1) & 1)
    count = before[1] if before[0] == ctx.kv_len - 1 else 0
    return before[2 : 2 + count]


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
