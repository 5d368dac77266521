"""The first two kernels of `top_k_tokens`: from scores to a few candidates per list."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.early_launch import await_inputs
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, tl
from gpu_ops.layout import Layout, allocate

_MAX_LEVEL = 8  # groups of up to 256 tokens
_MAX_TILE = 16384  # counts of a tile are in 16 bits
SCORE_ALIGNMENT = 16  # tokens: loads of scores are whole vectors
SIZES = ("sink_tokens", "recent_tokens", "budget_tokens")


@dataclass(frozen=True)
class TopKLaunch:
    """Sizes of the kernels; powers of two.

    Args:
        chunk_tokens: tokens of a program of the first kernel.
        max_groups: maxima that a program of the second holds; about four times the tokens to find.
        segments: programs of the second kernel per list.
        segment_tile: tokens that one of them looks at together.
        tile: candidates that the program of the third holds; more are read once more in each step.
        num_warps: of the programs of the three kernels.
    """

    chunk_tokens: int = 1024
    max_groups: int = 8192
    segments: int = 16
    segment_tile: int = 4096
    tile: int = 4096
    num_warps: tuple[int, int, int] = (4, 8, 16)

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_groups", "segments", "segment_tile", "tile"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}")
        if max(self.segment_tile, self.tile) > _MAX_TILE:
            raise ValueError(
                f"segment_tile and tile must be at most {_MAX_TILE},"
                f" got {self.segment_tile} and {self.tile}"
            )
        if not SCORE_ALIGNMENT <= self.chunk_tokens <= self.max_groups:
            raise ValueError(
                f"chunk_tokens must be {SCORE_ALIGNMENT} to max_groups ({self.max_groups}),"
                f" got {self.chunk_tokens}"
            )

    @property
    def max_level(self) -> int:
        """log2 of the tokens of the largest groups."""
        return min(_MAX_LEVEL, self.chunk_tokens.bit_length() - 1)

    @property
    def max_tokens(self) -> int:
        """The longest row whose maxima fit."""
        return self.max_groups << self.max_level

    @classmethod
    def default(cls, budget_tokens: int, max_tokens: int = 0) -> TopKLaunch:
        """What suits a budget on a Hopper GPU; more groups where a row is too long for them."""
        largest_groups = -(-max_tokens // (1 << _MAX_LEVEL))
        max_groups = next_power_of_2(max(2048, 4 * budget_tokens, largest_groups))
        max_groups = min(32768, max_groups)
        return cls(
            max_groups=max_groups,
            tile=min(8192, max(1024, next_power_of_2(-(-3 * budget_tokens // 2)))),
            num_warps=(4, 8 if max_groups <= 8192 else 16, 16),
        )


@dataclass(frozen=True)
class TopKBuffers:
    """Scratch of `top_k_tokens` for at most `max_lists` lists; nothing that counts stays in it.

    Attributes:
        importance: int32 [max_lists, max_tokens], bits of float32; -1 for sinks and recent tokens.
        maxima: int32 [max_lists, max_groups], of the importance in each group.
        candidates: int64 [max_lists, max_tokens], importance << 32 | token, by segments.
        lengths: int32 [max_lists, segments], candidates of each segment.
        certain: of the same shape, for `top_k_codes`: tokens that are chosen without being such.
    """

    launch: TopKLaunch
    importance: Tensor
    maxima: Tensor
    candidates: Tensor
    lengths: Tensor
    certain: Tensor

    @staticmethod
    def layout(max_lists: int, max_tokens: int, launch: TopKLaunch) -> Layout:
        """12 bytes a token and list.

        Args:
            max_lists: rows times heads, or rows where heads share a list.
            max_tokens: of the scores.

        Raises:
            ValueError: for more tokens than the launch can do.
        """
        if max_tokens > launch.max_tokens:
            raise ValueError(f"max_tokens must be at most {launch.max_tokens}, got {max_tokens}")
        return {
            "importance": ((max_lists, max_tokens), torch.int32),
            "maxima": ((max_lists, launch.max_groups), torch.int32),
            "candidates": ((max_lists, max_tokens), torch.int64),
            "lengths": ((max_lists, launch.segments), torch.int32),
            "certain": ((max_lists, launch.segments), torch.int32),
        }

    @classmethod
    def allocate(
        cls,
        max_lists: int,
        max_tokens: int,
        budget_tokens: int,
        device: torch.device | str,
        *,
        launch: TopKLaunch | None = None,
    ) -> TopKBuffers:
        """Buffers of `layout`."""
        launch = launch or TopKLaunch.default(budget_tokens, max_tokens)
        layout = cls.layout(max_lists, max_tokens, launch)
        return cls(launch, **allocate(layout, device, torch.empty))


@jit
def num_chosen(
    kv_len: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    RATIO: tl.constexpr,
) -> tl.tensor:
    """Tokens that are chosen beyond sinks and recent ones, of a row that exceeds the budget."""
    k = budget_tokens - sink_tokens - recent_tokens
    if RATIO is not None:
        # In float64, like the policy on the CPU: 0.07 * 100 has to come to the same there.
        share = tl.ceil(kv_len.to(tl.float64) * tl.full([], RATIO, tl.float64)).to(tl.int32)
        k = tl.minimum(k, tl.maximum(share - sink_tokens - recent_tokens, 0))
    return k


@jit
def group_level(last: tl.tensor, MAX_GROUPS: tl.constexpr, MAX_LEVEL: tl.constexpr) -> tl.tensor:
    """log2 of a group's tokens: the smallest with which the maxima of `last` tokens fit."""
    level = (last > MAX_GROUPS).to(tl.int32)
    for i in tl.static_range(1, MAX_LEVEL):
        level += (last > (MAX_GROUPS << i)).to(tl.int32)
    return level


@jit
def segment_length(last: tl.tensor, SEGMENTS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Tokens of every segment but the last: whole tiles."""
    return tl.cdiv(last, SEGMENTS * TILE) * TILE


@jit
def take(bits: tl.tensor, bound: tl.tensor, ties: tl.tensor) -> tl.tensor:
    """Those of a tile that exceed the bound, and the first `ties` of those that equal it.

    Returns:
        which; the place of each among them; how many they are; how many of them are ties.
    """
    # Both in one scan: a tile has fewer than 2**15 tokens.
    exceeds = bits > bound
    is_tie = bits == bound
    marks = exceeds.to(tl.int32) | (is_tie.to(tl.int32) << 16)
    up_to = tl.cumsum(marks, 0)
    taken = exceeds | (is_tie & ((up_to >> 16) <= ties))
    place = (up_to & 0xFFFF) + tl.minimum(up_to >> 16, ties) - 1
    total = tl.sum(marks, 0)
    num_ties = tl.minimum(total >> 16, ties)
    return taken, place, (total & 0xFFFF) + num_ties, num_ties


@jit
def store_maxima(
    bits: tl.tensor,  # [CHUNK]; -1 for what cannot be chosen
    maxima: tl.tensor,  # of the list
    chunk: tl.tensor,
    last: tl.tensor,
    CHUNK: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    MAX_LEVEL: tl.constexpr,
) -> None:
    """The largest of each group of a chunk's tokens."""
    level = group_level(last, MAX_GROUPS, MAX_LEVEL)
    for i in tl.static_range(0, MAX_LEVEL + 1):
        if level == i:
            largest = tl.max(tl.reshape(bits, [1 << i, CHUNK >> i]), 0)
            group = chunk * (CHUNK >> i) + tl.arange(0, CHUNK >> i)
            tl.store(maxima + group, largest)


@jit
def importance_of(
    t: tl.tensor,  # tokens
    inside: tl.tensor,
    scores: tl.tensor,
    lse: tl.tensor,
    heads: tl.tensor,
    row: tl.tensor,
    list_idx: tl.tensor,
    kv_head: tl.tensor,  # the first of the list's
    score_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS_OF_LIST: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> tl.tensor:
    """Attention weights of a list's tokens, summed over its query heads."""
    total = tl.zeros(t.shape, tl.float32)
    for i in range(HEADS_OF_LIST):
        head = list_idx + i
        of_head = scores + (row * NUM_HEADS + head) * GROUP_SIZE * score_stride
        if i > 0:
            kv_head = tl.load(heads + head)
        first_head = row * NUM_QO_HEADS + kv_head * GROUP_SIZE
        for g in tl.static_range(GROUP_SIZE):
            score = tl.load(of_head + g * score_stride + t, mask=inside, other=float("-inf"))
            total += tl.exp2(score - tl.load(lse + first_head + g) * 1.4426950408889634)
    return total


@jit_for_any(*SIZES)
def importance_kernel(
    scores: tl.tensor,
    lse: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    importance: tl.tensor,
    maxima: tl.tensor,
    score_stride: tl.tensor,
    importance_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    LISTS: tl.constexpr,  # of a row: NUM_HEADS, or 1 if they share it
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    MAX_LEVEL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per chunk of tokens, list and row."""
    await_inputs(EARLY)
    HEADS_OF_LIST: tl.constexpr = NUM_HEADS // LISTS
    chunk, list_idx = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row)
    kv_head = tl.load(heads + list_idx)  # of the first of the list's, together with the position
    kv_len = (position + 1).to(tl.int32)
    last = kv_len - recent_tokens
    if (kv_len <= budget_tokens) | (chunk * CHUNK >= last):
        return

    t = chunk * CHUNK + tl.arange(0, CHUNK)
    # Up to 15 tokens more than there are, so that loads are of whole vectors.
    inside = t < tl.cdiv(last, 16) * 16
    total = importance_of(
        t,
        inside,
        scores,
        lse,
        heads,
        row,
        list_idx,
        kv_head,
        score_stride,
        NUM_HEADS,
        HEADS_OF_LIST,
        NUM_QO_HEADS,
        GROUP_SIZE,
    )
    bits = total.to(tl.int32, bitcast=True)
    infinite = 0x7F800000
    # As NaN and infinity are above all others, they are among the candidates, which is noticed.
    bits = tl.where((bits >= 0) & (bits < infinite), bits, infinite)
    bits = tl.where((t >= sink_tokens) & (t < last), bits, -1)
    target = row * LISTS + list_idx
    tl.store(importance + target * importance_stride + t, bits, mask=inside)
    store_maxima(bits, maxima + target * MAX_GROUPS, chunk, last, CHUNK, MAX_GROUPS, MAX_LEVEL)


@jit_for_any(*SIZES)
def candidates_kernel(
    positions: tl.tensor,
    importance: tl.tensor,
    maxima: tl.tensor,
    candidates: tl.tensor,
    lengths: tl.tensor,
    importance_stride: tl.tensor,
    sink_tokens: tl.tensor,
    recent_tokens: tl.tensor,
    budget_tokens: tl.tensor,
    RATIO: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    MAX_LEVEL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per segment, list and row."""
    await_inputs(EARLY)
    segment = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    target = row * LISTS + tl.program_id(1)
    kv_len = (tl.load(positions + row) + 1).to(tl.int32)
    last = kv_len - recent_tokens
    length = segment_length(last, SEGMENTS, TILE)
    first = segment * length
    if (kv_len <= budget_tokens) | (first >= last):
        return

    # Of none to choose, one is looked at: it tells whether there is NaN or infinity.
    k = tl.maximum(num_chosen(kv_len, sink_tokens, recent_tokens, budget_tokens, RATIO), 1)
    t = first + tl.arange(0, TILE)
    of_row = importance + target * importance_stride
    inside = t < tl.cdiv(last, 16) * 16
    bits = tl.load(of_row + t, mask=inside, other=-1)  # under way while the bound is found
    # Groups of a chunk, in this order so that the compiler knows the factor, and loads vectors.
    level = group_level(last, MAX_GROUPS, MAX_LEVEL)
    num_groups = (tl.cdiv(last, CHUNK) << (MAX_LEVEL - level)) * (CHUNK >> MAX_LEVEL)
    group = tl.arange(0, MAX_GROUPS)
    of_groups = tl.load(maxima + target * MAX_GROUPS + group, mask=group < num_groups, other=-1)
    high = tl.max(of_groups, 0)
    low = tl.min(tl.where(of_groups >= 0, of_groups, high), 0)
    reach = tl.sum((of_groups >= 0).to(tl.int32), 0)
    if reach < k:  # all tokens are candidates; they are fewer than k groups of them
        low = tl.zeros([], tl.int32)
        high = tl.zeros([], tl.int32)
    # At least k reach `low`; a few more are cheaper than further steps.
    while (low < high) & (reach > k + k // 8):
        middle = low + (high - low + 1) // 2
        count = tl.sum((of_groups >= middle).to(tl.int32), 0)
        if count >= k:
            low = middle
            reach = count
        else:
            high = middle - 1

    found = tl.zeros([], tl.int32)
    ties = k  # of those that equal the bound, none after the first k of a segment can be chosen
    of_list = candidates + target * importance_stride + first
    for start in range(first, tl.minimum(first + length, last), TILE):
        t = start + tl.arange(0, TILE)
        if start > first:
            inside = t < tl.cdiv(last, 16) * 16
            bits = tl.load(of_row + t, mask=inside, other=-1)
        taken, place, count, num_ties = take(bits, low, ties)
        both = (bits.to(tl.int64) << 32) | t.to(tl.int64)
        tl.store(of_list + found + place, both, mask=taken)
        found += count
        ties -= num_ties
    tl.store(lengths + target * SEGMENTS + segment, found)
