"""The first of another policy's blocks that hold a share: `hard_kv` over page bounds.

What the policy selects is cut to its first blocks that hold a share of the softmax of all blocks'
scores, each counting for its tokens, at the temperature that its KV head got when the state was
built (`logits_calibration`). Tokens behind the last block stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from offload.policies.blocks import BlockPolicy
from offload.policies.hard_kv.logits_calibration import (
    WINDOW_QUERIES,
    Blocks,
    Calibrate,
    inverse_temperatures,
    needed_tokens,
    share_of,
)
from offload.policies.wrapped import WrappedPolicy
from offload.selection.callback import (
    Callback,
    ask_callback,
    callback,
    offset_floats,
    read_context,
    view_float32,
    view_float64,
    view_int32,
)
from offload.selection.compiled import cached_njit
from offload.selection.device_support import DeviceSupport
from offload.selection.layer_state import BuildContext, State, StateShape
from offload.selection.layouts import NumberLayout, StateLayout
from offload.selection.member_calls import (
    CALLBACKS,
    MemberNumbers,
    of_members,
    turn_back,
    turn_to,
)
from offload.selection.members import MembersState, joined
from offload.selection.policy import Policy

OWN = StateLayout(
    betas=np.float64,  # [num_kv_heads], 1 / temperature; 0: nothing is cut
    share=np.float64,  # [1], of the calibrated softmax
    # Scratch of each KV head, with room for all that may be chosen: blocks, and their masses.
    room=np.int64,  # [1]
    blocks=np.int32,
    masses=np.float32,
)
read_own = OWN.read
_ROUNDS = 40  # of bisection: scores are float32


@cached_njit()
def cut_to_share(
    indices: Any, scores: Any, starts: Any, last: Any, beta: Any, share: Any, blocks: Any, mass: Any
) -> Any:
    """Keep of ascending tokens, which are those of the highest scores, the first blocks that hold
    a share of all; blocks of equal scores stay or go together.

    Args:
        indices: tokens; those behind the last block stay.
        scores, starts: [num_blocks], [num_blocks + 1].
        last: no token from here on was there to choose.
        blocks, mass: scratch, as long as `indices`.

    Returns:
        how many are kept, at the beginning of `indices`.
    """
    num_blocks = len(scores)
    top = scores[0]
    for b in range(num_blocks):
        top = max(top, scores[b])
    wanted = 0.0
    for b in range(num_blocks):
        wanted += (min(starts[b + 1], last) - starts[b]) * np.exp(beta * (scores[b] - top))
    wanted *= share
    chosen = 0
    block = 0
    held = weight = 0.0
    low = top
    for token in indices:
        if token >= starts[num_blocks]:
            break
        while starts[block + 1] <= token:
            block += 1
        if chosen == 0 or blocks[chosen - 1] != block:
            blocks[chosen], mass[chosen] = block, 0.0
            weight = np.exp(beta * (scores[block] - top))
            low = min(low, scores[block])
            chosen += 1
        mass[chosen - 1] += weight
        held += weight
    if not held > wanted:
        return len(indices)
    # The highest threshold above which enough is held.
    least, most = np.float64(low), np.float64(top)
    for _ in range(_ROUNDS):
        middle = 0.5 * (least + most)
        above = 0.0
        for i in range(chosen):
            if scores[blocks[i]] >= middle:
                above += mass[i]
        if above >= wanted:
            least = middle
        else:
            most = middle
    count = 0
    block = 0
    for token in indices:
        while block < num_blocks and starts[block + 1] <= token:
            block += 1
        if block == num_blocks or scores[block] >= least:
            indices[count] = token
            count += 1
    return count


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    arrays, numbers = ctx.arrays, ctx.parameters
    state, ranked = read_own(arrays), turn_to(ctx, arrays, numbers, 0)
    count: int = ask_callback(pointer, np.int64(ranked.select))
    turn_back(ctx, arrays, numbers)
    beta = view_float64(state.betas, ctx.kv_head + 1)[ctx.kv_head]
    num_blocks = ctx.num_blocks
    if count <= 0 or num_blocks <= 0 or not beta > 0.0:
        return count
    at = ctx.kv_head * view_int32(state.room, 1)[0]
    kept: int = cut_to_share(
        view_int32(ctx.indices, count),
        view_float32(ctx.block_scores, num_blocks),
        view_int32(ctx.block_starts, num_blocks + 1),
        ctx.last,
        beta,
        view_float64(state.share, 1)[0],
        view_int32(offset_floats(state.blocks, at), count),
        view_float32(offset_floats(state.masses, at), count),
    )
    return kept


append = of_members("append", 1)


def past_blocks(
    policy: BlockPolicy, arrays: State, queries: Tensor, kv_len: int, sm_scale: float
) -> Blocks:
    """How `policy` would have ranked blocks for queries [num_qo_heads, n, head_dim] of the last n
    of `kv_len` tokens, each of which saw the whole blocks of its time.
    """
    scores, starts = policy.block_scores(arrays, queries, sm_scale)
    newest = torch.arange(kv_len - queries.shape[1], kv_len)[:, None]
    begins, ends = (torch.from_numpy(x).long() for x in (starts[:-1], starts[1:]))
    tokens = (ends.minimum(newest + 1 - policy.recent_tokens) - begins).clamp(min=0)
    return Blocks(scores, tokens * (ends <= newest + 1), torch.from_numpy(starts).long())


class ShareState(MembersState):
    """Temperatures, and the arrays of the policy that ranks."""

    policy: BlockShare

    def __init__(self, policy: BlockShare) -> None:
        super().__init__(policy, policy.parts, OWN)
        self.observed_queries = WINDOW_QUERIES

    def build(self, context: BuildContext) -> State:
        """The arrays of `inner`, and temperatures from the queries that were kept.

        They stay while the text gets longer, until it is built again. Built where there are few
        blocks (`logits_calibration.LEAST_BLOCKS`) there are none: nothing is cut but by the cap.
        """
        policy = self.policy
        arrays, inner = policy.inner.state.build(context), policy.inner
        num_kv_heads, kv_len, _ = context.keys.shape
        queries = context.queries
        room = policy.max_tokens - inner.sink_tokens - inner.recent_tokens
        blocks = past_blocks(inner, arrays, queries, kv_len, context.sm_scale)
        needed = needed_tokens(
            context.keys,
            queries,
            blocks,
            in_order=policy.calibrate == "mass",
            sm_scale=context.sm_scale,
            sink_tokens=inner.sink_tokens,
            recent_tokens=inner.recent_tokens,
            top_p=policy.top_p,
        )
        share = share_of(policy.calibrate, policy.top_p, len(queries) // num_kv_heads)
        betas = inverse_temperatures(blocks, needed, room, share)
        own = {
            "betas": betas.numpy(),
            "share": np.array([share]),
            "room": np.array([policy.max_tokens]),
            "blocks": np.zeros((num_kv_heads, policy.max_tokens), np.int32),
            "masses": np.zeros((num_kv_heads, policy.max_tokens), np.float32),
        }
        return own | joined({"inner": arrays})

    def num_bytes(self, shape: StateShape) -> int:
        own = 16 + shape.num_kv_heads * 8 * (1 + self.policy.max_tokens)
        return super().num_bytes(shape) + own


@dataclass(frozen=True)
class BlockShare(WrappedPolicy):
    """What `HardKV` asks over a policy that ranks blocks, in its place.

    Args:
        top_p: of the attention, see `HardKV`.
        max_tokens: the cap.
        calibrate: as of `HardKV`.
    """

    name: ClassVar[str] = "block_share"
    select: ClassVar[Callback | None] = select
    append: ClassVar[Callback | None] = append
    number_layout: ClassVar[NumberLayout | None] = MemberNumbers(OWN)
    device = cached_property(DeviceSupport)
    state = cached_property(ShareState)

    inner: BlockPolicy
    top_p: float
    max_tokens: int
    calibrate: Calibrate

    def __post_init__(self) -> None:
        inner = self.inner
        called = {name for name in CALLBACKS if getattr(inner, name) is not None}
        if called != {"select", "append"} or not inner.state.has_arrays:
            raise ValueError(
                f"hard_kv: {inner.name} must rank blocks by its arrays, select and append alone, "
                f"but has {', '.join(sorted(called))}"
            )

    @property
    def budget_tokens(self) -> int:
        return self.max_tokens

    @property
    def members(self) -> tuple[Policy, ...]:
        return (self,)

    @property
    def parts(self) -> dict[str, Policy]:
        return {"inner": self.inner}
