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
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.policies.base import Policy
from offload.policies.blocks import BlockPolicy
from offload.policies.callback import (
    Callback,
    callback,
    offset_floats,
    read_context,
    top_k,
    view_float32,
    view_int32,
)
from offload.policies.compiled import cached_njit
from offload.policies.device_build import to_host
from offload.policies.device_support import DeviceBuild, DeviceSupport
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
from offload.policies.quest_chunks import ChunkedQuest
from offload.policies.revised import Revised

STATE = StateLayout(
    **BOUNDS,
    pages=np.int32,  # [num_kv_heads] that have bounds
    starts=np.int32,  # [max_runs + 1]: first tokens of pages
    sizes=np.int32,  # SIZES
)
SIZES = ("page_tokens", *BOUNDS_SIZES)
read_state, read_sizes = STATE.read, reader(SIZES, np.int32)


@cached_njit()
def expand_pages(
    pages: Any, scores: Any, first: Any, last: Any, page_tokens: Any, budget: Any, indices: Any
) -> Any:
    """Tokens of the chosen pages, cut to the budget at the end of the page of lowest bound.

    Args:
        pages: ascending page numbers; page p begins at token first + p * page_tokens.
        scores: bound of every page.
        last: no token from here on.

    Returns:
        how many tokens were written to `indices`.
    """
    total = 0
    weakest = -1
    for i in range(len(pages)):
        begin = first + pages[i] * page_tokens
        total += min(begin + page_tokens, last) - begin
        if weakest < 0 or scores[pages[i]] <= scores[weakest]:
            weakest = pages[i]
    cut = max(0, total - budget)
    count = 0
    for i in range(len(pages)):
        begin = first + pages[i] * page_tokens
        end = min(begin + page_tokens, last)
        if pages[i] == weakest:
            end -= cut
        for token in range(begin, end):
            indices[count] = token
            count += 1
    return count


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    sizes = read_sizes(state.sizes)
    page_tokens = sizes.page_tokens

    # Tokens that no complete page holds: a few, if the recent window is shorter than a page.
    with_bounds = view_int32(state.pages, ctx.kv_head + 1)[ctx.kv_head]
    full_pages = min((ctx.kv_len - ctx.first) // page_tokens, with_bounds)
    last_paged = min(ctx.last, ctx.first + full_pages * page_tokens)
    num_loose = min(ctx.last - last_paged, ctx.budget_tokens)
    budget = ctx.budget_tokens - num_loose
    num_pages = (last_paged - ctx.first + page_tokens - 1) // page_tokens
    count: int = 0
    if budget > 0 and num_pages > 0:
        scores_at = score_bounds(pointer, ctx, state, sizes, num_pages)
        hand_over(ctx, scores_at, state.starts, num_pages)
        pages_at = offset_floats(state.chosen, ctx.kv_head * sizes.max_runs)
        wanted = min((budget + page_tokens - 1) // page_tokens, num_pages)
        chosen = top_k(pointer, ctx.top_k, scores_at, num_pages, wanted, pages_at)
        if chosen < 0:
            return -1
        indices = view_int32(ctx.indices, budget)
        # The recent window cuts the last page: if that was chosen, another page may be needed.
        short = num_pages * page_tokens - (last_paged - ctx.first)
        missing = budget - (chosen * page_tokens - short)
        pages = view_int32(pages_at, chosen)
        if missing > 0 and chosen < num_pages and pages[chosen - 1] == num_pages - 1:
            chosen = top_k(pointer, ctx.top_k, scores_at, num_pages, wanted + 1, pages_at)
            pages = view_int32(pages_at, chosen)
        scores = view_float32(scores_at, num_pages)
        count = expand_pages(pages, scores, ctx.first, last_paged, page_tokens, budget, indices)
    count = take_last(ctx, count, num_loose)
    return count


@callback
def append(pointer: Any) -> None:
    """Bounds of the pages that the newest token completes: one in `page_tokens` steps."""
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    sizes = read_sizes(state.sizes)
    page_tokens = sizes.page_tokens
    pages = view_int32(state.pages, ctx.kv_head + 1)
    page = pages[ctx.kv_head]
    while ctx.first + (page + 1) * page_tokens <= ctx.kv_len and page < sizes.max_runs:
        first = ctx.first + page * page_tokens
        store_bounds(pointer, ctx, state, sizes, page, first, page_tokens, page_tokens)
        page += 1
    pages[ctx.kv_head] = page


class PageState(LayerState):
    """Bounds of pages."""

    layout = STATE
    policy: Quest

    def build(self, context: BuildContext) -> State:
        """Bounds of all complete pages after the sinks."""
        return self.arrays(self.bounds(context.keys), context.capacity_tokens)

    def bounds(self, keys: Tensor) -> Tensor:
        """[num_kv_heads, num_pages, 2 * head_dim]: maxima, then minima."""
        return self._page_bounds(keys[:, self.policy.sink_tokens :])

    def _page_bounds(self, keys: Tensor) -> Tensor:
        """The same of keys that begin with a page."""
        policy = self.policy
        num_pages = keys.shape[1] // policy.page_tokens
        pages = keys[:, : num_pages * policy.page_tokens].view(
            len(keys), num_pages, policy.page_tokens, keys.shape[2]
        )
        if keys.device.type == "cpu":
            extremes = _reduce(torch.maximum, pages), _reduce(torch.minimum, pages)
        else:
            extremes = pages.amax(2), pages.amin(2)
        return torch.cat(extremes, dim=-1)

    def arrays(self, rows: Tensor, capacity_tokens: int) -> State:
        num_kv_heads, num_pages, _ = rows.shape
        pages = np.full(num_kv_heads, num_pages, np.int32)
        return self._with_room(bounds_of(rows), pages, capacity_tokens)

    def _with_room(
        self, bounds: npt.NDArray[Any], pages: npt.NDArray[np.int32], capacity_tokens: int
    ) -> State:
        """All arrays, for these bounds [num_kv_heads, parts, num_pages, width] and more."""
        policy = self.policy
        max_pages = max(1, bounds.shape[2], self._pages_of(capacity_tokens))
        arrays = bounds_arrays(bounds, max_pages, policy.page_tokens, [policy.page_tokens])
        starts = policy.sink_tokens + policy.page_tokens * np.arange(max_pages + 1, dtype=np.int32)
        return arrays | {"pages": pages, "starts": starts}

    def num_bytes(self, shape: StateShape) -> int:
        max_pages = max(1, self._pages_of(shape.capacity_tokens))
        shared = bounds_bytes(shape, max_pages, self.policy.page_tokens)
        return shared + 4 * shape.num_kv_heads + 4 * (max_pages + 1) + 4 * len(SIZES)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int) -> State:
        """The same bounds with room for `capacity_tokens` tokens."""
        return self._with_room(arrays["bounds"], arrays["pages"].copy(), capacity_tokens)

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Pages that are no longer complete lose their bounds; `append` makes them anew."""
        pages = arrays["pages"]
        np.minimum(pages, self._pages_of(kv_len), out=pages)
        return True

    rewind = truncate  # bounds say nothing of steps

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Bounds of the pages that have such tokens."""
        page = self._pages_of(revised.first)
        keys = revised.load_keys(self.policy.sink_tokens + page * self.policy.page_tokens)
        bounds = bounds_of(self._page_bounds(keys))
        stop = min(page + bounds.shape[2], arrays["bounds"].shape[2])
        arrays["bounds"][:, :, page:stop] = bounds[:, :, : stop - page]
        arrays["pages"][:] = stop
        return True

    def _pages_of(self, num_tokens: int) -> int:
        """Complete pages of so many tokens."""
        return max(0, num_tokens - self.policy.sink_tokens) // self.policy.page_tokens


class PageDevice(DeviceSupport):
    """The bounds are taken there."""

    builds = True
    policy: Quest

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same, with the bounds taken on the device."""
        pages = PageState(self.policy)
        bounds, capacity_tokens = to_host(pages.bounds(context.keys)), context.capacity_tokens
        return lambda: pages.arrays(bounds, capacity_tokens)


@dataclass(frozen=True)
class Quest(BlockPolicy):
    """The pages whose bound on the group's summed scores is largest, up to `budget_tokens`.

    The last page is cut where the budget ends. Tokens after the last complete page are always
    attended; the recent window holds them unless it is shorter than a page.

    Args:
        page_tokens: tokens that share a bound.
        chunks: bounds of chunks that end where the text does, of about as many tokens (see
            `quest_chunks`), instead of pages.
    """

    name: ClassVar[str] = "quest"
    select: ClassVar[Callback | None] = select
    append: ClassVar[Callback | None] = append
    state = cached_property(lambda self: self.members[0].state if self.chunks else PageState(self))
    device = cached_property(
        lambda self: self.members[0].device if self.chunks else PageDevice(self)
    )

    page_tokens: int = 16
    chunks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.page_tokens, int) or isinstance(self.page_tokens, bool):
            raise ValueError(f"page_tokens must be an int, got {self.page_tokens!r}")
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {self.page_tokens}")
        if not isinstance(self.chunks, bool):
            raise ValueError(f"chunks must be true or false, got {self.chunks!r}")

    @cached_property
    def members(self) -> tuple[Policy, ...]:
        """Another one over chunks."""
        if not self.chunks:
            return (self,)
        options = {option.name: getattr(self, option.name) for option in fields(ChunkedQuest)}
        return (ChunkedQuest(**options),)

    def block_scores(
        self, arrays: State, queries: Tensor, sm_scale: float
    ) -> tuple[Tensor, npt.NDArray[np.int32]]:
        num_pages = int(arrays["pages"][0])
        scores = past_scores(arrays, queries, sm_scale, num_pages)
        return scores, arrays["starts"][: num_pages + 1]


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
