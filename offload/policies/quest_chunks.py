"""Quest's bounds over structure-aware chunks instead of fixed pages: `quest` with chunks=True.

Source: LycheeCluster's pilot study (arXiv 2603.08453, section 3.1): the same scores, other units.
Chunks end where the text does (see `lychee_cluster.chunks`), between half a page and one and a half
of them, so that they are about as long as pages. The best chunks are taken until the budget is
full; the last one is cut at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from offload.policies.blocks import BlockPolicy
from offload.policies.callback import (
    Callback,
    callback,
    offset_floats,
    read_context,
    top_k,
    view_float32,
    view_int32,
    view_uint8,
)
from offload.policies.compiled import cached_njit
from offload.policies.key_bounds import (
    BOUNDS,
    BOUNDS_SIZES,
    bounds_arrays,
    bounds_bytes,
    bounds_of,
    hand_over,
    past_scores,
    score_bounds,
    store_bounds,
    take_last,
)
from offload.policies.layer_state import BuildContext, LayerState, State, StateShape
from offload.policies.layouts import StateLayout, reader
from offload.policies.lychee_cluster.chunks import chunk_length, cut_chunks
from offload.policies.revised import Revised

STATE = StateLayout(
    **BOUNDS,
    starts=np.int32,  # [num_kv_heads, max_runs + 1]: first tokens, then where the last one ends
    chunks=np.int32,  # [num_kv_heads] that have bounds
    sizes=np.int32,  # SIZES
)
SIZES = ("min_tokens", "max_tokens", *BOUNDS_SIZES)
read_state, read_sizes = STATE.read, reader(SIZES, np.int32)


@cached_njit()
def keep_budget(chunks: Any, scores: Any, starts: Any, last: Any, budget: Any, indices: Any) -> Any:
    """Tokens of the best chunks up to the budget, ascending.

    Args:
        chunks: ascending numbers of the best chunks, at least as many as the budget has room for;
            those that are not kept become -1.
        scores: bound of every chunk.
        last: no token from here on.

    Returns:
        how many tokens were written to `indices`.
    """
    total = 0
    for i in range(len(chunks)):
        total += min(starts[chunks[i] + 1], last) - starts[chunks[i]]
    cut = -1  # the chunk that is cut
    while total > budget and cut < 0:
        weakest = -1
        for i in range(len(chunks)):
            chunk = chunks[i]
            if chunk >= 0 and (weakest < 0 or scores[chunk] <= scores[chunks[weakest]]):
                weakest = i
        length = min(starts[chunks[weakest] + 1], last) - starts[chunks[weakest]]
        if total - length >= budget:
            chunks[weakest] = -1
            total -= length
        else:
            cut = chunks[weakest]
    count = 0
    for i in range(len(chunks)):
        if chunks[i] < 0:
            continue
        end = min(starts[chunks[i] + 1], last)
        if chunks[i] == cut:
            end -= total - budget
        for token in range(starts[chunks[i]], end):
            indices[count] = token
            count += 1
    return count


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    sizes = read_sizes(state.sizes)
    starts = view_int32(state.starts, sizes.max_runs + 1, ctx.kv_head)

    # Rows of one step see only what there was before them.
    whole = view_int32(state.chunks, ctx.kv_head + 1)[ctx.kv_head]
    while whole > 0 and starts[whole] > ctx.kv_len:
        whole -= 1
    last = min(ctx.last, starts[whole])
    num_loose = min(ctx.last - last, ctx.budget_tokens)
    budget = ctx.budget_tokens - num_loose
    num_chunks = whole
    while num_chunks > 0 and starts[num_chunks - 1] >= last:
        num_chunks -= 1
    count: int = 0
    if budget > 0 and num_chunks > 0:
        scores_at = score_bounds(pointer, ctx, state, sizes, num_chunks)
        starts_at = offset_floats(state.starts, ctx.kv_head * (sizes.max_runs + 1))
        hand_over(ctx, scores_at, starts_at, num_chunks)
        chosen_at = offset_floats(state.chosen, ctx.kv_head * sizes.max_runs)
        # All but the last chunk have min_tokens.
        wanted = min(budget // sizes.min_tokens + 2, num_chunks)
        chosen = top_k(pointer, ctx.top_k, scores_at, num_chunks, wanted, chosen_at)
        if chosen < 0:
            return -1
        chunks, scores = view_int32(chosen_at, chosen), view_float32(scores_at, num_chunks)
        indices = view_int32(ctx.indices, budget)
        count = keep_budget(chunks, scores, starts, last, budget, indices)
    count = take_last(ctx, count, num_loose)
    return count


@callback
def append(pointer: Any) -> None:
    """Bounds of the chunks that the newest token completes: one in about `page_tokens` steps."""
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    sizes = read_sizes(state.sizes)
    longest = sizes.max_tokens
    starts = view_int32(state.starts, sizes.max_runs + 1, ctx.kv_head)
    chunks = view_int32(state.chunks, ctx.kv_head + 1)
    chunk = chunks[ctx.kv_head]
    marks = view_uint8(ctx.text_marks, ctx.kv_len if ctx.text_marks != 0 else 0)
    while starts[chunk] + longest <= ctx.kv_len and chunk < sizes.max_runs:
        first = starts[chunk]
        length = chunk_length(marks, first, ctx.kv_len, sizes.min_tokens, longest)
        store_bounds(pointer, ctx, state, sizes, chunk, first, length, longest)
        chunk += 1
        starts[chunk] = first + length
    chunks[ctx.kv_head] = chunk


class ChunkState(LayerState):
    """Bounds of chunks."""

    layout = STATE
    reads_text = True
    policy: ChunkedQuest

    def build(self, context: BuildContext) -> State:
        """Bounds of all chunks that no later token could cut otherwise."""
        policy = self.policy
        keys = context.keys
        starts = cut_chunks(
            context.text_marks,
            policy.sink_tokens,
            keys.shape[1],
            policy.min_tokens,
            policy.max_tokens,
        )
        bounds = torch.empty(len(keys), len(starts) - 1, 2 * keys.shape[2], dtype=keys.dtype)
        lengths = np.diff(starts)
        for length in np.unique(lengths).tolist():
            of_length = np.flatnonzero(lengths == length)
            tokens = torch.from_numpy(starts[of_length][:, None] + np.arange(length))
            rows = keys[:, tokens]  # [num_kv_heads, chunks, length, head_dim]
            extremes = torch.cat([rows.amax(2), rows.amin(2)], dim=-1)
            bounds[:, torch.from_numpy(of_length)] = extremes
        heads = np.tile(starts.astype(np.int32), (len(keys), 1))
        return self._arrays(bounds_of(bounds), heads, context.capacity_tokens)

    def _arrays(
        self,
        bounds: npt.NDArray[Any],
        starts: npt.NDArray[np.int32],
        capacity_tokens: int,
    ) -> State:
        """All arrays, for these bounds [num_kv_heads, parts, chunks, width] and more."""
        policy = self.policy
        num_kv_heads, _, num_chunks, _ = bounds.shape
        max_chunks = max(num_chunks, self._max_chunks(capacity_tokens))
        numbers = [policy.min_tokens, policy.max_tokens]
        all_starts = np.zeros((num_kv_heads, max_chunks + 1), np.int32)
        all_starts[:, : starts.shape[1]] = starts
        return bounds_arrays(bounds, max_chunks, policy.max_tokens, numbers) | {
            "starts": all_starts,
            "chunks": np.full(num_kv_heads, num_chunks, np.int32),
        }

    def num_bytes(self, shape: StateShape) -> int:
        max_chunks = self._max_chunks(shape.capacity_tokens)
        shared = bounds_bytes(shape, max_chunks, self.policy.max_tokens)
        return shared + 4 * shape.num_kv_heads * (max_chunks + 2) + 4 * len(SIZES)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int) -> State:
        """The same bounds with room for `capacity_tokens` tokens."""
        grown = self._arrays(arrays["bounds"], arrays["starts"], capacity_tokens)
        return {**grown, "chunks": arrays["chunks"].copy()}

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Chunks that other tokens could cut otherwise lose their bounds; `append` makes them."""
        starts, chunks = arrays["starts"], arrays["chunks"]
        for head, count in enumerate(chunks.tolist()):
            known = starts[head, :count] + self.policy.max_tokens <= kv_len
            chunks[head] = int(known.sum())
        return True

    rewind = truncate  # bounds say nothing of steps

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Bounds of the chunks that have such tokens, which end where they did."""
        starts, num_chunks = arrays["starts"][0], int(arrays["chunks"][0])
        chunk = int(np.searchsorted(starts[1 : num_chunks + 1], revised.first, side="right"))
        keys, begin = revised.load_keys(int(starts[chunk])), int(starts[chunk])
        for i in range(chunk, num_chunks):
            of_chunk = keys[:, starts[i] - begin : starts[i + 1] - begin]
            rows = torch.cat([of_chunk.amax(1), of_chunk.amin(1)], dim=-1)
            arrays["bounds"][:, :, i] = bounds_of(rows[:, None])[:, :, 0]
        return True

    def _max_chunks(self, capacity_tokens: int) -> int:
        return max(1, max(0, capacity_tokens - self.policy.sink_tokens) // self.policy.min_tokens)


@dataclass(frozen=True)
class ChunkedQuest(BlockPolicy):
    """What `Quest` with chunks=True asks; its options are Quest's."""

    name: ClassVar[str] = "quest"
    select: ClassVar[Callback | None] = select
    append: ClassVar[Callback | None] = append
    state = cached_property(ChunkState)

    page_tokens: int = 16

    @property
    def min_tokens(self) -> int:
        """The fewest tokens of a chunk."""
        return max(1, self.page_tokens // 2)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a chunk."""
        return 2 * self.page_tokens - self.min_tokens

    def block_scores(
        self, arrays: State, queries: torch.Tensor, sm_scale: float
    ) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        num_chunks = int(arrays["chunks"][0])
        scores = past_scores(arrays, queries, sm_scale, num_chunks)
        return scores, arrays["starts"][0, : num_chunks + 1]
