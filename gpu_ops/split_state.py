"""Device functions of attention that is split over programs: partial states and their merge.

A program leaves its state of `online_softmax` (row_max, row_sum, acc) in a slot of two float32
buffers, partial_out [slots, head_dim], normalised, and partial_lse [slots], in base 2. A slot is of
one query head.
"""

from __future__ import annotations

from gpu_ops.launch import jit, tl


@jit
def split_length(
    num_tokens: tl.tensor, NUM_SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, min_tiles: tl.tensor
) -> tl.tensor:
    """Tokens of every split but the last: whole tiles."""
    tiles = tl.cdiv(num_tokens, NUM_SPLITS * BLOCK_T)
    return tl.maximum(tiles, min_tiles) * BLOCK_T


@jit
def store_state(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    slots: tl.tensor,  # [BLOCK_G], of each query head of the group
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Normalise a group's state into its slots; one of no tokens has an lse of -inf and 0."""
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    inside = (g < GROUP_SIZE)[:, None] & (d < HEAD_DIM)[None, :]
    attended = row_sum != 0  # NaN is no sum of no tokens
    row_sum = tl.where(attended, row_sum, 1.0)
    o = acc / row_sum[:, None]
    lse = tl.where(attended, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(partial_out + slots[:, None] * HEAD_DIM + d[None, :], o, mask=inside)
    tl.store(partial_lse + slots, lse, mask=g < GROUP_SIZE)


@jit
def merge_states(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    first_slot: tl.tensor,
    stride: tl.tensor,  # slots from one split of the head to the next
    used: tl.tensor,  # splits that have been stored
    d: tl.tensor,  # which elements of the head
    HEAD_DIM: tl.constexpr,
    TILE_S: tl.constexpr,  # splits that are loaded at once
) -> tl.tensor:
    """(largest, total, acc): acc / total is the head's output, largest + log2(total) its lse."""
    # Finite, also if all are of no tokens: exp2(-inf - -inf) would be NaN.
    largest = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([d.shape[0]], tl.float32)
    for start in range(0, used, TILE_S):
        s = start + tl.arange(0, TILE_S)
        slots = first_slot + s * stride
        # Neither load waits for the other.
        lse = tl.load(partial_lse + slots, mask=s < used, other=float("-inf"))
        rows = partial_out + slots[:, None] * HEAD_DIM + d[None, :]
        o = tl.load(rows, mask=(s < used)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        decay = tl.exp2(largest - new_largest)
        weights = tl.exp2(lse - new_largest)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * o, 0)
        largest = new_largest
    return largest, total, acc
