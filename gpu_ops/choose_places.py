"""Places among hot rows for the tokens of a list: the map of what is hot is the GPU's own.

Of heads whose tokens the GPU finds by itself (`top_k_codes`). The rows that a list lacks come
instead of others: of rows that no list had for some steps, in turn; of those of fewer steps, where
there are not enough. `gathered_attention` brings them while it attends to all that is hot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gpu_ops.checks import check_dims, check_tensor
from gpu_ops.early_launch import await_inputs, can_launch_early, early_option
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.layout import Layout

_AGE = 4  # steps in which no list had a row that goes first
_LOG2_OF_NONE = float("-inf")


def fresh(token: Tensor) -> Tensor:
    """What stands for a token whose row is not there yet; and back."""
    return -2 - token


def stride_of(capacity: int) -> int:
    """Places from one that goes to the next, once all are taken: so that what is missing lies all
    over, and every program of `gathered_attention` brings a few rows."""
    stride = int(capacity * 0.618)
    while math.gcd(stride, capacity) > 1:
        stride -= 1
    return max(stride, 1)


@dataclass(frozen=True)
class HotMap:
    """What is hot, of T heads of all layers and `num_slots` sequences.

    Attributes:
        place_of: int16 [num_slots, T, max_tokens], of each token; -1: it is not hot.
        token_of: int32 [num_slots, T, capacity], of each place; -1: none; `fresh` of a token: its
            row has yet to be brought.
        used: int32 likewise: the position of the step that last listed it; -1: none did.
        state: int32 [num_slots, T, 2]: whose turn it is next, and how many are hot: places [0, so
            many).
        cluster_of: uint8 [num_slots, T, max_tokens or 0], see offload/selection/estimate.py.
        cluster_counts: int32 [num_slots, T, clusters], tokens of each.
        hot_counts: likewise, those of them that are hot.
    """

    place_of: Tensor
    token_of: Tensor
    used: Tensor
    state: Tensor
    cluster_of: Tensor
    cluster_counts: Tensor
    hot_counts: Tensor

    @staticmethod
    def layout(
        num_slots: int, num_heads: int, *, max_tokens: int, capacity: int, clusters: int
    ) -> Layout:
        heads = (num_slots, num_heads)
        return {
            "place_of": ((*heads, max_tokens), torch.int16),
            "token_of": ((*heads, capacity), torch.int32),
            "used": ((*heads, capacity), torch.int32),
            "state": ((*heads, 2), torch.int32),
            "cluster_of": ((*heads, max_tokens if clusters else 0), torch.uint8),
            "cluster_counts": ((*heads, clusters), torch.int32),
            "hot_counts": ((*heads, clusters), torch.int32),
        }

    def clear(self, slot: int) -> None:
        """Nothing of the slot is hot, nor in a cluster."""
        for tensor in (self.place_of, self.token_of, self.used):
            tensor[slot].fill_(-1)
        for tensor in (self.state, self.cluster_counts, self.hot_counts):
            tensor[slot].zero_()

    def rows(self, rows: slice) -> HotMap:
        """That of some slots."""
        return HotMap(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@jit
def choose_places_kernel(
    selection: tl.tensor,
    counts: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    place_of: tl.tensor,
    token_of: tl.tensor,
    used: tl.tensor,
    state: tl.tensor,
    cluster_of: tl.tensor,
    cluster_counts: tl.tensor,
    hot_in: tl.tensor,
    log_counts: tl.tensor,  # None: nothing is estimated
    missing: tl.tensor,
    held_counts: tl.tensor,
    first_head: tl.tensor,
    num_mapped: tl.tensor,
    max_tokens: tl.tensor,
    list_tokens: tl.tensor,
    fetch_tokens: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    RECENT_TOKENS: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_CLUSTERS: tl.constexpr,
    AGE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per head and row."""
    await_inputs(EARLY)
    slot, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * NUM_KV_HEADS + tl.load(heads + slot)
    of_map = row * num_mapped + first_head + slot
    position = tl.load(positions + row).to(tl.int32)
    i, p, c = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    is_active = position >= 0
    num = tl.minimum(tl.load(counts + at) - SINK_TOKENS - RECENT_TOKENS, fetch_tokens)
    listed = (i < num) & is_active
    token = tl.load(selection + at * list_tokens + SINK_TOKENS + i, mask=listed, other=0)
    listed &= (token >= 0) & (token < max_tokens)
    place_of += of_map * max_tokens
    cluster_of += of_map * max_tokens
    token_of += of_map * CAPACITY
    used += of_map * CAPACITY
    missing += at * fetch_tokens

    hand, num_held = tl.load(state + 2 * of_map), tl.load(state + 2 * of_map + 1)
    turn = hand + p
    turn = tl.where(turn >= CAPACITY, turn - CAPACITY, turn)
    turn = tl.where(num_held == CAPACITY, turn * STRIDE % CAPACITY, turn)
    inside = p < CAPACITY
    old = tl.load(token_of + turn, mask=inside, other=-1)
    old = tl.where(old < -1, -2 - old, old)  # a step before was interrupted
    place = tl.load(place_of + token, mask=listed, other=0).to(tl.int32)
    is_missing = listed & (place < 0)
    tl.store(used + place, position, mask=listed & (place >= 0))
    rank = tl.cumsum(is_missing.to(tl.int32), 0) - 1
    num_missing = tl.sum(is_missing.to(tl.int32), 0)
    tl.store(missing + rank, token, mask=is_missing)
    tl.debug_barrier()

    last_used = tl.load(used + turn, mask=inside, other=position, cache_modifier=".cg")
    num_old = tl.sum((last_used < position - AGE).to(tl.int32), 0)
    before = tl.where(num_old >= num_missing, position - AGE, position)
    goes = last_used < before
    order = tl.cumsum(goes.to(tl.int32), 0) - 1
    goes &= order < num_missing
    new = tl.load(missing + order, mask=goes, other=0, cache_modifier=".cg")
    is_gone = goes & (old >= 0)
    tl.store(place_of + old, tl.full([BLOCK_P], -1, tl.int16), mask=is_gone)
    tl.store(place_of + new, turn.to(tl.int16), mask=goes)
    tl.store(token_of + turn, -2 - new, mask=goes)
    tl.store(used + turn, position + tl.zeros([BLOCK_P], tl.int32), mask=goes)
    next_hand = hand + tl.max(tl.where(goes, p, -1), 0) + 1
    num_hot = num_held + num_missing - tl.sum(is_gone.to(tl.int32), 0)
    tl.debug_barrier()  # all threads have read the state
    tl.store(state + 2 * of_map, next_hand % CAPACITY)
    tl.store(state + 2 * of_map + 1, num_hot)
    fixed: tl.constexpr = SINK_TOKENS + RECENT_TOKENS
    tl.store(held_counts + at, tl.where(is_active, num_hot + fixed, 0))

    if log_counts is not None:
        cluster_counts += of_map * NUM_CLUSTERS
        hot_in += of_map * NUM_CLUSTERS
        coming = tl.load(cluster_of + new, mask=goes, other=255).to(tl.int32)
        going = tl.load(cluster_of + old, mask=is_gone, other=255).to(tl.int32)
        tl.atomic_add(hot_in + coming, 1, mask=goes & (coming < NUM_CLUSTERS))
        tl.atomic_add(hot_in + going, -1, mask=is_gone & (going < NUM_CLUSTERS))
        tl.debug_barrier()
        exists = (c < NUM_CLUSTERS) & is_active
        left = tl.load(cluster_counts + c, mask=exists, other=0)
        left -= tl.load(hot_in + c, mask=exists, other=0, cache_modifier=".cg")
        logs = tl.log2(tl.maximum(left, 1).to(tl.float32))
        logs = tl.where(left > 0, logs, float("-inf"))
        # Where there is no list the output shows it.
        logs = tl.where(tl.load(counts + at) < 0, float("nan"), logs)
        tl.store(log_counts + at * NUM_CLUSTERS + c, logs, mask=c < NUM_CLUSTERS)


def choose_places(
    selection: Tensor,
    counts: Tensor,
    positions: Tensor,
    heads: Tensor,
    hot_map: HotMap,
    *,
    first_head: int,
    sink_tokens: int,
    recent_tokens: int,
    scratch: Tensor,
    held_counts: Tensor,
    log_counts: Tensor | None = None,
) -> None:
    """Have the tokens of lists among the hot ones, and say which rows have to be brought for that.

    Args:
        selection, counts: int32 [n, num_kv_heads, list_tokens] and [n, num_kv_heads], as
            `TopKLists` has them. Of sinks and recent tokens no rows are hot. Where a list could
            not be made, log_counts are NaN.
        positions: int64 [n], each row's last token; -1 for an inactive row.
        heads: int32 [num_heads], of a layer, whose first is `first_head` of the map's.
        hot_map: of n slots; changed.
        scratch: int32 [n, num_kv_heads, fetch_tokens]; lists are of at most fetch_tokens rows.
        held_counts: out int32 [n, num_kv_heads], how many rows are then hot, sinks and recent ones
            added, as `gathered_attention` takes it; 0 of inactive rows.
        log_counts: out float32 [n, num_kv_heads, clusters], as `gathered_attention` takes it; None:
            nothing is estimated of tokens that are not hot.

    Raises:
        ValueError: operands that do not fit together.
    """
    device = selection.device
    check_dims("selection", selection, "[n, num_kv_heads, list_tokens]")
    n, num_kv_heads, list_tokens = selection.shape
    check_dims("scratch", scratch, "[n, num_kv_heads, fetch_tokens]")
    fetch_tokens, num_heads = scratch.shape[2], heads.shape[0]
    check_tensor("selection", selection, selection.shape, torch.int32, device)
    check_tensor("counts", counts, (n, num_kv_heads), torch.int32, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    check_tensor("scratch", scratch, (n, num_kv_heads, fetch_tokens), torch.int32, device)
    check_tensor("held_counts", held_counts, (n, num_kv_heads), torch.int32, device)
    _, num_mapped, max_tokens = hot_map.place_of.shape
    capacity, clusters = hot_map.token_of.shape[2], hot_map.cluster_counts.shape[2]
    layout = HotMap.layout(
        n, num_mapped, max_tokens=max_tokens, capacity=capacity, clusters=clusters
    )
    for name, (shape, dtype) in layout.items():
        check_tensor(f"hot_map.{name}", getattr(hot_map, name), shape, dtype, device)
    if not 0 <= first_head <= num_mapped - num_heads:
        raise ValueError(
            f"first_head must be in [0, {num_mapped - num_heads}] for {num_heads} of {num_mapped} "
            f"heads, got {first_head}"
        )
    if list_tokens - sink_tokens - recent_tokens > fetch_tokens:
        raise ValueError(
            f"lists of {list_tokens} tokens, {sink_tokens} sinks and {recent_tokens} recent ones "
            f"among them, must be of at most {fetch_tokens} others"
        )
    if capacity < 2 * fetch_tokens or capacity > torch.iinfo(torch.int16).max:
        raise ValueError(
            f"a map must have at least {2 * fetch_tokens} places for lists of {fetch_tokens}, and "
            f"at most {torch.iinfo(torch.int16).max}, got {capacity}"
        )
    if log_counts is not None:
        check_tensor("log_counts", log_counts, (n, num_kv_heads, clusters), torch.float32, device)
    lists = (selection, counts, positions, heads)
    if not runs_kernel(selection):
        fixed = (sink_tokens, recent_tokens)
        return choose_places_reference(
            *lists, hot_map, first_head, fixed, fetch_tokens, held_counts, log_counts
        )
    early = can_launch_early(selection)
    choose_places_kernel[(num_heads, n)](
        *lists,
        *(getattr(hot_map, field.name) for field in fields(hot_map)),
        log_counts,
        scratch,
        held_counts,
        first_head,
        num_mapped,
        max_tokens,
        list_tokens,
        fetch_tokens,
        num_kv_heads,
        sink_tokens,
        recent_tokens,
        capacity,
        stride_of(capacity),
        clusters,
        _AGE,
        next_power_of_2(fetch_tokens),
        next_power_of_2(capacity),
        next_power_of_2(max(clusters, 1)),
        early,
        num_warps=16,
        **early_option(early),
    )


def choose_places_reference(
    selection: Tensor,
    counts: Tensor,
    positions: Tensor,
    heads: Tensor,
    hot_map: HotMap,
    first_head: int,
    fixed: tuple[int, int],
    fetch_tokens: int,
    held_counts: Tensor,
    log_counts: Tensor | None,
) -> None:
    """`choose_places` by torch."""
    capacity, (sinks, recent) = hot_map.token_of.shape[2], fixed
    for row, position in enumerate(positions.tolist()):
        for i, head in enumerate(heads.tolist()):
            held_counts[row, head] = 0
            if log_counts is not None:
                log_counts[row, head] = _LOG2_OF_NONE
            if position < 0:
                continue
            at = (row, first_head + i)
            place_of, token_of, used = (
                getattr(hot_map, name)[at] for name in ("place_of", "token_of", "used")
            )
            num = min(max(int(counts[row, head]) - sinks - recent, 0), fetch_tokens)
            listed = selection[row, head, sinks : sinks + num].long()
            places = place_of[listed].long()
            used[places[places >= 0]] = position
            missing = listed[places < 0]
            hand, num_held = hot_map.state[at].tolist()
            turns = (hand + torch.arange(capacity)) % capacity
            if num_held == capacity:
                turns = turns * stride_of(capacity) % capacity
            old = used[turns] < position - _AGE
            goes = old if int(old.sum()) >= len(missing) else used[turns] < position
            chosen = goes.nonzero()[: len(missing), 0]
            victims = turns[chosen]
            gone = token_of[victims]
            gone = torch.where(gone < -1, fresh(gone), gone)
            place_of[gone[gone >= 0].long()] = -1
            place_of[missing], token_of[victims] = victims.to(torch.int16), fresh(missing).int()
            used[victims] = position
            if len(missing):
                hot_map.state[at][0] = (hand + int(chosen[-1]) + 1) % capacity
            hot_map.state[at][1] += len(missing) - int((gone >= 0).sum())
            held_counts[row, head] = hot_map.state[at][1] + sinks + recent
            if log_counts is not None:
                hot = torch.where(token_of < -1, fresh(token_of), token_of)
                hot = hot[hot >= 0].long()
                clusters = hot_map.cluster_of[at][hot].long()
                in_use = torch.bincount(clusters, minlength=256)[: log_counts.shape[2]]
                hot_map.hot_counts[at] = in_use.int()
                left = hot_map.cluster_counts[at] - in_use
                log_counts[row, head] = left.clamp_min(0).float().log2()
                if int(counts[row, head]) < 0:
                    log_counts[row, head] = float("nan")
