"""Device functions of attention: a softmax over tiles of keys, and over programs.

A state is (row_max, row_sum, acc) of a KV head's group of query heads, in base 2: scores carry the
factor log2(e), as the GPU's exponential is a power of two. Where scores have a soft cap, so does
that: they are cap * tanh(score / cap).

Where attention is split over programs each leaves its state in a slot of two float32 buffers,
partial_out [slots, head_dim], normalised, and partial_lse [slots], in base 2. A slot is of one
query head.

A head whose dimensions are no power of two but almost one (576, as of latent attention) is its
first BLOCK_D elements and a rest. Where values are the first LATENT_DIM elements of keys, a state's
acc has those alone, and values are not read but taken from the tile of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.launch import jit, next_power_of_2, tl
from gpu_ops.load_rows import code_numbers, load_rows

# Bytes of a tile of keys. Keys and values of three tiles are in flight at once (num_stages), which
# lets two programs share the 227 KB of a multiprocessor.
_TILE_BYTES = 16384
NUM_STAGES = 3
_MIN_GROUP = 16  # rows that tensor cores multiply at once: a smaller group is padded
_WIDE_HEAD_DIM = 256  # above it a program has few query heads, and its head has a rest
_WIDE_GROUP = 32


@dataclass(frozen=True)
class Tiles:
    """How programs divide a KV head's query heads and tokens.

    Attributes:
        group: query heads of a program, a power of two.
        num_groups: programs of a KV head.
        tokens: keys of a tile, a power of two.
        dims, rest_dims: powers of two that have the elements of a head; of the rest 0: none.
        value_dims: a power of two that has the elements of a value.
        num_warps: of a program.
    """

    group: int
    num_groups: int
    tokens: int
    dims: int
    rest_dims: int
    value_dims: int
    num_warps: int

    @classmethod
    def of(
        cls,
        head_dim: int,
        group_size: int,
        itemsize: int,
        rows: torch.dtype | None = None,
        latent_dim: int = 0,
    ) -> Tiles:
        """Args: as of `tile_tokens`; latent_dim as of `retrieval_attention`."""
        dims, rest_dims, num_warps = next_power_of_2(head_dim), 0, 4
        group = max(_MIN_GROUP, next_power_of_2(group_size))
        if head_dim > _WIDE_HEAD_DIM:
            group, num_warps = min(group, _WIDE_GROUP), 8
            rest = max(64, next_power_of_2(head_dim - dims // 2))
            if rest < dims // 2:
                dims, rest_dims = dims // 2, rest
        value_dims = next_power_of_2(latent_dim or head_dim)
        tokens = tile_tokens(dims, itemsize, rows)
        # There are no tiles of values; int8 rows would not fit registers.
        if latent_dim and value_dims == dims and rows != torch.int8:
            tokens = tile_tokens(dims // 2, itemsize)
        num_groups = -(-group_size // group)
        return cls(group, num_groups, tokens, dims, rest_dims, value_dims, num_warps)


@jit
def load_query(
    query: tl.tensor,
    first_head: tl.tensor,
    g: tl.tensor,  # [BLOCK_G], which of the group's query heads
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr = 0,
) -> tl.tensor:
    """[BLOCK_G, BLOCK_D]: query heads, padded with zeros, from the element FIRST on."""
    d = FIRST + tl.arange(0, BLOCK_D)
    inside = (g < GROUP_SIZE)[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(query + (first_head + g)[:, None] * HEAD_DIM + d[None, :], inside, other=0.0)


@jit
def score_tile(
    q: tl.tensor,
    q_rest: tl.tensor,  # [BLOCK_G, BLOCK_R], the elements behind those of q; None: none are
    keys: tl.tensor,  # pointer to the first key of the tile; rows of ROW_ITEMS follow each other
    num_tokens: tl.tensor,  # of the tile, at least 1
    scale: tl.tensor,
    cap: tl.tensor,  # softcap * log2(e); None: scores are not capped
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """The scores [BLOCK_G, BLOCK_T], -inf where there is no token; and the keys, but their rest."""
    t = tl.arange(0, BLOCK_T)
    exists = t < num_tokens
    k = load_rows(keys, t, exists, q.dtype, HEAD_DIM, ROW_ITEMS, q.shape[1])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if q_rest is not None:
        k_rest = load_rows(
            keys, t, exists, q.dtype, HEAD_DIM, ROW_ITEMS, q_rest.shape[1], q.shape[1]
        )
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
    return scaled_scores(scores, exists, scale, cap), k


@jit
def query_codes(q: tl.tensor) -> tl.tensor:
    """Rows of 16 bits as step * (high + low / 254) of int8, to 2**-16 of the largest element:
    float32 [BLOCK_G] and both of int8."""
    x = q.to(tl.float32)
    step = tl.max(tl.abs(x), 1) / 127.0 + tl.sum(x * 0.0, 1)  # no number, if an element is none
    x *= tl.where(step > 0.0, 1.0 / step, 0.0)[:, None]
    high = tl.floor(x + 0.5)
    low = tl.floor((x - high) * 254.0 + 0.5)
    return step, high.to(tl.int8), low.to(tl.int8)


@jit
def score_codes(
    q: tl.tensor,  # of groups of 64 dimensions, or of BLOCK_D if that is less: of `query_codes`
    codes: tl.tensor,  # of keys, [BLOCK_T, 64] each
    scales: tl.tensor,  # [BLOCK_T] each
    exists: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
) -> tl.tensor:
    """The scores of int8 keys, whose codes tensor cores multiply as they are."""
    scores = tl.zeros([q[0][1].shape[0], exists.shape[0]], tl.float32)
    for i in tl.static_range(len(q)):
        step, high, low = q[i]
        keys = tl.trans(codes[i])
        of_high = tl.dot(high, keys, out_dtype=tl.int32).to(tl.float32)
        of_low = tl.dot(low, keys, out_dtype=tl.int32).to(tl.float32)
        products = (of_high + of_low * (1.0 / 254.0)) * step[:, None]
        scores += products * scales[i].to(tl.float32)[None, :]
    return scaled_scores(scores, exists, scale, cap)


@jit
def scaled_scores(
    scores: tl.tensor, exists: tl.tensor, scale: tl.tensor, cap: tl.tensor
) -> tl.tensor:
    """Products as scores, -inf where there is no token."""
    scores *= scale
    if cap is not None:  # the base-2 exponent of 2 * score / cap, of which tanh is made
        powers = tl.exp2(scores * (2.8853900817779268 / cap))
        scores = cap * (1.0 - 2.0 / (powers + 1.0))
    return tl.where(exists[None, :], scores, float("-inf"))


@jit
def weigh_tile(
    scores: tl.tensor,
    k: tl.tensor,  # the tile's keys, of `score_tile`
    values: tl.tensor,  # as keys of `score_tile`
    num_tokens: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    dtype: tl.constexpr,  # that weights and values are multiplied in
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
) -> tl.tensor:
    """The state after the tile of these scores."""
    t = tl.arange(0, scores.shape[1])
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    if LATENT_DIM > 0 and acc.shape[1] == k.shape[1]:
        v = k
    else:
        v = load_rows(values, t, t < num_tokens, dtype, HEAD_DIM, ROW_ITEMS, acc.shape[1])
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, row_sum * decay + tl.sum(weights, 1), acc


@jit
def weigh_codes(
    scores: tl.tensor,
    codes: tl.tensor,  # of values, as in `score_codes`
    scales: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,  # [BLOCK_G, 64] each
    dtype: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """The state after the tile of these scores, of int8 values."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    out = ()
    for i in tl.static_range(len(acc)):
        of_group, numbers = acc[i] * decay[:, None], code_numbers(codes[i], dtype, PACKED)
        scale = scales[i].to(tl.float32)
        if dtype == tl.float16:  # a small weight times a small scale would be 0: shares of scales
            most = tl.max(scale, 0)
            scale *= tl.where(most > 0.0, 1.0 / most, 0.0)
            scaled = (weights * scale[None, :]).to(dtype)
            of_group += tl.dot(scaled, numbers, input_precision="ieee") * most
        else:
            scaled = (weights * scale[None, :]).to(dtype)
            of_group = tl.dot(scaled, numbers, of_group, input_precision="ieee")
        out += (of_group,)  # type: ignore[assignment]
    return new_max, row_sum * decay + tl.sum(weights, 1), out


@jit
def attend_rows(
    q: tl.tensor,
    q_rest: tl.tensor,
    keys: tl.tensor,  # pointer to the first key of all; rows of ROW_ITEMS follow each other
    values: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,  # elements of acc
) -> tl.tensor:
    """The state after the tokens [first, last). Each is loaded once for the whole group."""
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_V], tl.float32)
    for start in range(first, last, BLOCK_T):
        k = keys + start * ROW_ITEMS
        v = k if LATENT_DIM > 0 else values + start * ROW_ITEMS
        scores, tile = score_tile(
            q, q_rest, k, last - start, scale, cap, HEAD_DIM, ROW_ITEMS, BLOCK_T
        )
        state = (row_max, row_sum, acc)
        row_max, row_sum, acc = weigh_tile(
            scores, tile, v, last - start, *state, q.dtype, HEAD_DIM, ROW_ITEMS, LATENT_DIM
        )
    return row_max, row_sum, acc


@jit
def attend_means(
    q: tl.tensor,
    q_rest: tl.tensor,
    keys: tl.tensor,  # as of `attend_rows`, of q's dtype
    values: tl.tensor,
    log_counts: tl.tensor,  # pointer to the base-2 logarithm of how many tokens each row stands for
    NUM_ROWS: tl.constexpr,
    scale: tl.tensor,
    cap: tl.tensor,
    row_max: tl.tensor,  # finite: something was attended to before
    row_sum: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """The state after rows that stand for several tokens each, or for none."""
    for start in range(0, NUM_ROWS, BLOCK_T):
        k = keys + start * HEAD_DIM
        v = k if LATENT_DIM > 0 else values + start * HEAD_DIM
        t = start + tl.arange(0, BLOCK_T)
        more = tl.load(log_counts + t, mask=t < NUM_ROWS, other=float("-inf"))
        scores, tile = score_tile(
            q, q_rest, k, NUM_ROWS - start, scale, cap, HEAD_DIM, HEAD_DIM, BLOCK_T
        )
        scores += more[None, :]
        state = (row_max, row_sum, acc)
        row_max, row_sum, acc = weigh_tile(
            scores, tile, v, NUM_ROWS - start, *state, q.dtype, HEAD_DIM, HEAD_DIM, LATENT_DIM
        )
    return row_max, row_sum, acc


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
    g: tl.tensor,  # [BLOCK_G], which of the group's query heads
    slots: tl.tensor,  # [BLOCK_G], theirs
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # LATENT_DIM, or HEAD_DIM where that is 0
) -> None:
    """Normalise a group's state into its slots; one of no tokens has an lse of -inf and 0."""
    d = tl.arange(0, acc.shape[1])
    inside = (g < GROUP_SIZE)[:, None] & (d < VALUE_DIM)[None, :]
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
    VALUE_DIM: tl.constexpr,  # as of `store_state`
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
        o = tl.load(rows, mask=(s < used)[:, None] & (d < VALUE_DIM)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        decay = tl.exp2(largest - new_largest)
        weights = tl.exp2(lse - new_largest)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * o, 0)
        largest = new_largest
    return largest, total, acc


@jit
def with_sink(total: tl.tensor, largest: tl.tensor, sinks: tl.tensor, head: tl.tensor) -> tl.tensor:
    """`total` and the weight of a head's sink, which has no value: with exponents of differences to
    `largest`, which is finite where that is a number."""
    return total + tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - largest)


def tile_tokens(head_dim: int, itemsize: int, rows: torch.dtype | None = None) -> int:
    """BLOCK_T: keys of a tile, of `itemsize` bytes an element, or of int8 `rows`."""
    if rows == torch.int8:
        itemsize = 4  # they pass through registers, as float32
    return max(16, min(128, _TILE_BYTES // (next_power_of_2(head_dim) * itemsize)))


def capped(scores: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(scores / softcap), or with 0 the scores as they are."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores
