"""Quest: pages of keys with element-wise minima and maxima, searched by their upper bound.

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (ICML
2024), with its pages of 16 tokens. No key k of a page with maxima M and minima m beats

    q.k <= max(q, 0).M + min(q, 0).m,

which is one row product of [max(q, 0) | min(q, 0)] with [M | m]. The query heads of a group share a
selection by the sum of their bounds, which is the bound of the sum: one row product for the whole
group. On SmolLM2 at 6-7K tokens that keeps as much attention mass as the best of nine other ways to
combine them (0.931 of it with 1,024 tokens; maximum 0.918, sum of softmax over pages 0.931), and
more than all of them with 2 % of the tokens.

Pages begin after the sink tokens, so that a sink's large key does not lift its page. Bounds take a
sixteenth of the bytes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.policies.blocks import BlockPolicy
from offload.policies.quest.key_bounds import (
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
from offload.selection.callback import (
    Callback,
    callback,
    offset_floats,
    read_context,
    top_k,
    view_float32,
    view_int32,
)
from offload.selection.compiled import cached_njit
from offload.selection.device_build import to_host
from offload.selection.device_support import DeviceBuild, DeviceSupport
from offload.selection.layer_state import BuildContext, LayerState, State, StateShape
from offload.selection.layouts import NumberLayout, StateLayout, reader
from offload.selection.revised import Revised

STATE = StateLayout(
    **BOUNDS,
    runs=np.int32,  # [num_kv_heads] that have bounds
    starts=np.int32,  # [1, max_runs + 1]: first tokens, then where the last one ends
    sizes=np.int32,  # BOUNDS_SIZES
)
NUMBERS = NumberLayout("page_tokens")
read_state, read_numbers = STATE.read, NUMBERS.read
read_sizes = reader(BOUNDS_SIZES, np.int32)


@cached_njit()
def keep_budget(runs: Any, scores: Any, starts: Any, last: Any, budget: Any, indices: Any) -> Any:
    """Tokens of the best runs up to the budget, ascending; the last one is cut at its end.

    Args:
        runs: ascending numbers of the best runs, at least as many as the budget has room for;
            those that are not kept become -1.
        scores: bound of every run.
        starts: first token of every run, then where the last one ends.
        last: no token from here on.

    Returns:
        how many tokens were written to `indices`.
    """
    total = 0
    for i in range(len(runs)):
        total += min(starts[runs[i] + 1], last) - starts[runs[i]]
    cut = -1  # the run that is cut
    while total > budget and cut < 0:
        weakest = -1
        for i in range(len(runs)):
            run = runs[i]
            if run >= 0 and (weakest < 0 or scores[run] <= scores[runs[weakest]]):
                weakest = i
        length = min(starts[runs[weakest] + 1], last) - starts[runs[weakest]]
        if total - length >= budget:
            runs[weakest] = -1
            total -= length
        else:
            cut = runs[weakest]
    count = 0
    for i in range(len(runs)):
        if runs[i] < 0:
            continue
        end = min(starts[runs[i] + 1], last)
        if runs[i] == cut:
            end -= total - budget
        for token in range(starts[runs[i]], end):
            indices[count] = token
            count += 1
    return count


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    state, numbers = read_state(ctx.arrays), read_numbers(ctx.parameters)
    sizes = read_sizes(state.sizes)
    starts = view_int32(state.starts, sizes.max_runs + 1)

    # Rows of one step see only what there was before them.
    whole = view_int32(state.runs, ctx.kv_head + 1)[ctx.kv_head]
    while whole > 0 and starts[whole] > ctx.kv_len:
        whole -= 1
    # Tokens that no whole run holds: a few, if the recent window is shorter than a run.
    last = min(ctx.last, starts[whole])
    num_loose = min(ctx.last - last, ctx.budget_tokens)
    budget = ctx.budget_tokens - num_loose
    num_runs = whole
    while num_runs > 0 and starts[num_runs - 1] >= last:
        num_runs -= 1
    count: int = 0
    if budget > 0 and num_runs > 0:
        scores_at = score_bounds(pointer, ctx, state, sizes, num_runs)
        hand_over(ctx, scores_at, state.starts, num_runs)
        chosen_at = offset_floats(state.chosen, ctx.kv_head * sizes.max_runs)
        # All but the last run, which the recent window may cut, are whole.
        wanted = min(budget // int(numbers.page_tokens) + 2, num_runs)
        chosen = top_k(pointer, ctx.top_k, scores_at, num_runs, wanted, chosen_at)
        if chosen < 0:
            return -1
        runs, scores = view_int32(chosen_at, chosen), view_float32(scores_at, num_runs)
        indices = view_int32(ctx.indices, budget)
        count = keep_budget(runs, scores, starts, last, budget, indices)
    count = take_last(ctx, count, num_loose)
    return count


@callback
def append(pointer: Any) -> None:
    """Bounds of the runs that the newest token completes: one in `page_tokens` steps."""
    ctx = read_context(pointer)
    state, numbers = read_state(ctx.arrays), read_numbers(ctx.parameters)
    sizes = read_sizes(state.sizes)
    page_tokens = int(numbers.page_tokens)
    starts = view_int32(state.starts, sizes.max_runs + 1)
    runs = view_int32(state.runs, ctx.kv_head + 1)
    run = runs[ctx.kv_head]
    while starts[run] + page_tokens <= ctx.kv_len and run < sizes.max_runs:
        store_bounds(pointer, ctx, state, sizes, run, starts[run], page_tokens)
        run += 1
    runs[ctx.kv_head] = run


class BoundsState(LayerState):
    """Bounds of pages."""

    layout = STATE
    policy: Quest

    def build(self, context: BuildContext) -> State:
        """Bounds of all whole pages after the sinks."""
        return self.arrays_of_pages(self.page_bounds(context.keys), context.capacity_tokens)

    def page_bounds(self, keys: Tensor) -> Tensor:
        """[num_kv_heads, num_pages, 2 * head_dim]: maxima, then minima, of all whole pages."""
        tokens, sinks = self.policy.page_tokens, self.policy.sink_tokens
        num_pages = max(0, keys.shape[1] - sinks) // tokens
        pages = keys[:, sinks : sinks + num_pages * tokens]
        return _extremes(pages.view(len(keys), num_pages, tokens, keys.shape[2]))

    def arrays_of_pages(self, rows: Tensor, capacity_tokens: int) -> State:
        num_kv_heads, num_pages, _ = rows.shape
        runs = np.full(num_kv_heads, num_pages, np.int32)
        return self._arrays(bounds_of(rows), runs, capacity_tokens)

    def _arrays(
        self, bounds: npt.NDArray[Any], runs: npt.NDArray[np.int32], capacity_tokens: int
    ) -> State:
        """All arrays, for these bounds [num_kv_heads, parts, runs, width] and more."""
        policy = self.policy
        max_runs = max(bounds.shape[2], self._max_runs(capacity_tokens))
        pages = np.arange(max_runs + 1, dtype=np.int32)
        starts = policy.sink_tokens + policy.page_tokens * pages[None]
        arrays = bounds_arrays(bounds, max_runs, policy.page_tokens)
        return arrays | {"runs": runs, "starts": starts}

    def num_bytes(self, shape: StateShape) -> int:
        max_runs = self._max_runs(shape.capacity_tokens)
        shared = bounds_bytes(shape, max_runs, self.policy.page_tokens)
        return shared + 4 * shape.num_kv_heads + 4 * (max_runs + 1) + 4 * len(BOUNDS_SIZES)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        """The same bounds with room for `capacity_tokens` tokens."""
        return self._arrays(arrays["bounds"], arrays["runs"].copy(), capacity_tokens)

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Pages that are no longer whole lose their bounds; `append` makes new ones."""
        np.minimum(arrays["runs"], self._whole_pages(kv_len), out=arrays["runs"])
        return True

    rewind = truncate  # bounds say nothing of steps

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Bounds of the pages that have such tokens; all pages that are whole now have some."""
        policy, runs = self.policy, arrays["runs"]
        runs[:] = min(self._whole_pages(revised.kv_len), arrays["bounds"].shape[2])
        starts, num_runs = arrays["starts"][0], int(runs[0])
        run = int(np.searchsorted(starts[1 : num_runs + 1], revised.first, side="right"))
        if run == num_runs:
            return True
        begin = int(starts[run])
        keys = revised.load_keys(begin)[:, : int(starts[num_runs]) - begin]
        pages = keys.reshape(len(keys), num_runs - run, policy.page_tokens, -1)
        arrays["bounds"][:, :, run:num_runs] = bounds_of(_extremes(pages))
        return True

    def _whole_pages(self, kv_len: int) -> int:
        return max(0, kv_len - self.policy.sink_tokens) // self.policy.page_tokens

    def _max_runs(self, capacity_tokens: int) -> int:
        return max(1, self._whole_pages(capacity_tokens))


class PageDevice(DeviceSupport):
    """The bounds are taken there."""

    builds = True
    policy: Quest

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same, with the bounds taken on the device."""
        state = BoundsState(self.policy)
        bounds, capacity_tokens = to_host(state.page_bounds(context.keys)), context.capacity_tokens
        return lambda: state.arrays_of_pages(bounds, capacity_tokens)


@dataclass(frozen=True)
class Quest(BlockPolicy):
    """The pages whose bound on the group's summed scores is largest, up to `budget_tokens`.

    The last page is cut where the budget ends. Tokens after the last complete page are always
    attended; the recent window holds them unless it is shorter than a page.

    Args:
        page_tokens: tokens that share a bound.
    """

    name: ClassVar[str] = "quest"
    select: ClassVar[Callback | None] = select
    append: ClassVar[Callback | None] = append
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    state = cached_property(BoundsState)
    device = cached_property(PageDevice)

    page_tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.page_tokens, int) or isinstance(self.page_tokens, bool):
            raise ValueError(f"page_tokens must be an int, got {self.page_tokens!r}")
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {self.page_tokens}")

    def block_scores(
        self, arrays: State, queries: Tensor, sm_scale: float
    ) -> tuple[Tensor, npt.NDArray[np.int32]]:
        num_runs = int(arrays["runs"][0])
        scores = past_scores(arrays, queries, sm_scale, num_runs)
        return scores, arrays["starts"][0, : num_runs + 1]


def _extremes(runs: Tensor) -> Tensor:
    """[num_kv_heads, num_runs, n, head_dim] -> [.., 2 * head_dim]: maxima, then minima."""
    if runs.device.type == "cpu":
        extremes = _reduce(torch.maximum, runs), _reduce(torch.minimum, runs)
    else:
        extremes = runs.amax(2), runs.amin(2)
    return torch.cat(extremes, dim=-1)


def _reduce(pick: Callable[[Tensor, Tensor], Tensor], pages: Tensor) -> Tensor:
    """[num_kv_heads, num_pages, n, head_dim] -> [num_kv_heads, num_pages, head_dim].

    By halves, because torch's amax over bfloat16 takes four times as long.
    """
    while (n := pages.shape[2]) > 1:
        half = n // 2
        rest = pages[:, :, 2 * half :]
        pages = pick(pages[:, :, :half], pages[:, :, half : 2 * half])
        if rest.shape[2]:
            pages = torch.cat([pages, rest], dim=2)
    return pages[:, :, 0]
