"""Element-wise extremes of runs of keys, and a query's scores that they bound (`quest`).

The bounds of a KV head are [parts, max_runs, 2 * head_dim / parts] in the cache's dtype: maxima and
minima of a run in one row, or, where that is too wide for `score_rows`, in one row each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.selection.callback import (
    load_keys,
    offset_floats,
    score_rows,
    store_rows,
    view_float32,
    view_int32,
)
from offload.selection.compiled import cached_njit
from offload.selection.layer_state import State, StateShape

_MAX_ROW_WIDTH = 256  # of score_rows
BOUNDS: dict[str, npt.DTypeLike | None] = {
    "bounds": None,  # [num_kv_heads, parts, max_runs, 2 * head_dim / parts]
    # Scratch of each KV head: [max(q, 0) | min(q, 0)], scores, chosen runs, a run's keys.
    "split": np.float32,  # [.., 2 * head_dim]
    "scores": np.float32,  # [.., 2, max_runs]
    "chosen": np.int32,  # [.., max_runs]
    "keys": np.float32,  # [.., longest run * head_dim]
}
BOUNDS_SIZES = ("max_runs", "parts", "item_bytes")


@cached_njit()
def split_query(query: Any, group_size: Any, head_dim: Any, split: Any) -> None:
    """split [2 * head_dim] = sums over the group of max(q, 0) and of min(q, 0); query is flat."""
    for d in range(head_dim):
        above = np.float32(0.0)
        below = np.float32(0.0)
        for g in range(group_size):
            x = query[g * head_dim + d]
            if x > 0.0:
                above += x
            else:
                below += x  # NaN comes here, and on into the scores
        split[d] = above
        split[head_dim + d] = below


@cached_njit()
def page_bounds(keys: Any, page_tokens: Any, head_dim: Any, bounds: Any) -> None:
    """bounds [2 * head_dim] = maxima and minima of each element; keys is flat, a row per token."""
    for d in range(head_dim):
        highest = keys[d]
        lowest = keys[d]
        for i in range(1, page_tokens):
            x = keys[i * head_dim + d]
            highest = max(highest, x)
            lowest = min(lowest, x)
        bounds[d] = highest
        bounds[head_dim + d] = lowest


@cached_njit()
def score_bounds(pointer: Any, ctx: Any, state: Any, sizes: Any, num_runs: Any) -> Any:
    """Bounds of the first runs' scores, summed over the group: address of float32 [num_runs]."""
    head_dim, max_runs, width = ctx.head_dim, sizes.max_runs, 2 * ctx.head_dim // sizes.parts
    split_at = offset_floats(state.split, ctx.kv_head * 2 * head_dim)
    scores_at = offset_floats(state.scores, ctx.kv_head * 2 * max_runs)
    query = view_float32(ctx.query, ctx.group_size * head_dim)
    split_query(query, ctx.group_size, head_dim, view_float32(split_at, 2 * head_dim))
    part_bytes = max_runs * width * sizes.item_bytes
    rows = state.bounds + ctx.kv_head * sizes.parts * part_bytes
    group_size = ctx.group_size
    ctx.group_size = 1  # score_rows shall take one query, the group's
    score_rows(pointer, ctx.score_rows, split_at, rows, num_runs, width, scores_at)
    if sizes.parts == 2:
        query_at, more_at = offset_floats(split_at, width), offset_floats(scores_at, max_runs)
        score_rows(pointer, ctx.score_rows, query_at, rows + part_bytes, num_runs, width, more_at)
        scores, more = view_float32(scores_at, num_runs), view_float32(more_at, num_runs)
        for i in range(num_runs):
            scores[i] += more[i]
    ctx.group_size = group_size
    return scores_at


def past_scores(arrays: State, queries: Tensor, sm_scale: float, num_runs: int) -> Tensor:
    """What `score_bounds` gives queries [num_qo_heads, n, head_dim], before a step: float32
    [num_kv_heads, n, num_runs].
    """
    bounds = arrays["bounds"][:, :, :num_runs]
    rows = torch.from_numpy(bounds.view(np.int16) if bounds.dtype == np.uint16 else bounds)
    rows = (rows.view(torch.bfloat16) if bounds.dtype == np.uint16 else rows).float()
    num_kv_heads, parts, _, width = rows.shape
    n = queries.shape[1]
    groups = queries.float().reshape(num_kv_heads, -1, n, queries.shape[2])
    split = torch.cat([groups.clamp(min=0.0).sum(1), groups.clamp(max=0.0).sum(1)], dim=-1)
    split = split.view(num_kv_heads, n, parts, width).transpose(1, 2)
    scores: Tensor = sm_scale * (split @ rows.transpose(2, 3)).sum(1)
    return scores


@cached_njit()
def hand_over(ctx: Any, scores_at: Any, starts_at: Any, num_runs: Any) -> None:
    """Leave in the context what was ranked, as `offload.policies.blocks` says."""
    ctx.block_scores, ctx.block_starts, ctx.num_blocks = scores_at, starts_at, num_runs


@cached_njit()
def store_bounds(
    pointer: Any, ctx: Any, state: Any, sizes: Any, run: Any, first: Any, length: Any
) -> None:
    """Bounds of a run of tokens, the newest of which the step has brought."""
    head_dim, item_bytes, width = ctx.head_dim, sizes.item_bytes, 2 * ctx.head_dim // sizes.parts
    split_at = offset_floats(state.split, ctx.kv_head * 2 * head_dim)
    keys_at = offset_floats(state.keys, ctx.kv_head * length * head_dim)
    load_keys(pointer, ctx.load_keys, first, length, keys_at)
    keys = view_float32(keys_at, length * head_dim)
    page_bounds(keys, length, head_dim, view_float32(split_at, 2 * head_dim))
    for part in range(sizes.parts):
        row = (ctx.kv_head * sizes.parts + part) * sizes.max_runs + run
        x, out = offset_floats(split_at, part * width), state.bounds + row * width * item_bytes
        store_rows(pointer, ctx.store_rows, x, width, out)
    ctx.bytes_touched += 2 * head_dim * item_bytes


@cached_njit()
def take_last(ctx: Any, count: Any, num_last: Any) -> Any:
    """Write the last tokens before ctx.last behind `count` indices; how many there are then."""
    indices = view_int32(ctx.indices, count + num_last)
    for i in range(num_last):
        indices[count + i] = ctx.last - num_last + i
    return count + num_last


def bounds_of(rows: Tensor) -> npt.NDArray[Any]:
    """Bounds of rows [num_kv_heads, num_runs, 2 * head_dim], maxima before minima."""
    num_kv_heads, num_runs, both = rows.shape
    parts = 1 if both <= _MAX_ROW_WIDTH else 2
    return as_numpy(rows.view(num_kv_heads, num_runs, parts, both // parts).transpose(1, 2))


def bounds_arrays(bounds: npt.NDArray[Any], max_runs: int, longest: int) -> State:
    """The arrays of BOUNDS, and "sizes", with room for `max_runs` runs of at most `longest` tokens.

    Args:
        bounds: [num_kv_heads, parts, num_runs, width] of those that there are.
    """
    num_kv_heads, parts, num_runs, width = bounds.shape
    room = np.zeros((num_kv_heads, parts, max_runs, width), bounds.dtype)
    room[:, :, :num_runs] = bounds
    head_dim = parts * width // 2
    return {
        "bounds": room,
        "sizes": np.array([max_runs, parts, bounds.itemsize], np.int32),
        "split": np.zeros((num_kv_heads, 2 * head_dim), np.float32),
        "scores": np.zeros((num_kv_heads, 2, max_runs), np.float32),
        "chosen": np.zeros((num_kv_heads, max_runs), np.int32),
        "keys": np.zeros((num_kv_heads, longest * head_dim), np.float32),
    }


def bounds_bytes(shape: StateShape, max_runs: int, longest: int) -> int:
    """Bytes of the arrays of `bounds_arrays`, but for "sizes"."""
    of_run = 2 * shape.head_dim * shape.item_bytes + 12
    of_head = of_run * max_runs + 4 * shape.head_dim * (2 + longest)
    return shape.num_kv_heads * of_head


def as_numpy(x: Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as an array; bfloat16, which NumPy lacks, as uint16."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[Any] = x.numpy()
    return array
