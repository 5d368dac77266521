"""Structure-aware chunks: LycheeCluster's unit of retrieval (arXiv 2603.08453, section 4.3).

A chunk grows to `min_tokens`, then ends at the best delimiter before `max_tokens` are full. Chunks
lie one after the other. Their starts are kept in 1.25 bytes a chunk: the start of every sixteenth
as an int32, of each as the distance to it in a uint8 (16 chunks of at most 16 tokens).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from offload.selection.compiled import cached_njit
from offload.selection.text_marks import cut_level

BLOCK_SHIFT = 4
BLOCK = 1 << BLOCK_SHIFT  # chunks that share a start
MAX_CHUNK_TOKENS = 16  # (BLOCK - 1) * MAX_CHUNK_TOKENS must fit a uint8


@cached_njit()
def chunk_length(marks: Any, start: int, n: int, min_tokens: int, max_tokens: int) -> int:
    """Length of the chunk that begins at token `start`.

    The best level wins and, among equals, the last: longer chunks make a smaller index, and the
    runs of delimiters that close a unit (`}`, `,`, newline) stay together.

    Args:
        marks: uint8 [n] text marks, or an empty array: no text, fixed chunks of max_tokens.
        n: known tokens; the chunk ends there at the latest.
    """
    longest = min(max_tokens, n - start)
    if len(marks) == 0:
        return longest
    best, best_level = longest, 5
    for length in range(min_tokens, longest + 1):
        level = cut_level(marks, start + length - 1, n)
        if 0 < level <= best_level:
            best, best_level = length, level
    return best


@cached_njit()
def chunk_start(blocks: Any, offsets: Any, chunk: int) -> int:
    """First token of a chunk; of one past the last chunk: where the chunks end."""
    return int(blocks[chunk >> BLOCK_SHIFT] + offsets[chunk])


@cached_njit()
def set_chunk_start(blocks: Any, offsets: Any, chunk: int, token: int) -> None:
    """Write the start of `chunk`; those below it must be there."""
    if chunk % BLOCK == 0:
        blocks[chunk // BLOCK] = token
    offsets[chunk] = token - blocks[chunk // BLOCK]


@cached_njit()
def _cut(
    marks: Any, first: int, last: int, n: int, min_tokens: int, max_tokens: int, starts: Any
) -> int:
    count = 0
    start = first
    # A chunk may end at `last` only if it would have ended there with more to come.
    while start + max_tokens <= last:
        starts[count] = start
        start += chunk_length(marks, start, n, min_tokens, max_tokens)
        count += 1
    starts[count] = start
    return count


def cut_chunks(
    marks: npt.NDArray[np.uint8] | None,
    first: int,
    last: int,
    min_tokens: int = 8,
    max_tokens: int = 16,
) -> npt.NDArray[np.int64]:
    """Starts of the whole chunks in [first, last), and the end of the last one: int64 [count + 1].

    Args:
        marks: uint8 [>= last] of all tokens from 0 on (those beyond `last` help decide), or None.
    """
    if marks is None:
        marks = np.zeros(0, np.uint8)
    room = np.empty(max(0, last - first) // min_tokens + 2, np.int64)
    n = max(last, len(marks))
    count: int = _cut(marks, first, last, n, min_tokens, max_tokens, room)
    starts: npt.NDArray[np.int64] = room[: count + 1].copy()
    return starts
