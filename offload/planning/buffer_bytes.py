"""How many bytes a decode step's buffers, pages and tables take: the arithmetic of what allocates
them, for who must know before anything is allocated.

Each function says which allocation it counts; `tests/planning/test_plan.py` compares them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from offload.decode.gpu.pages import whole_slabs

if TYPE_CHECKING:
    from offload.models.shape import ModelShape

_FLOAT32 = _INT32 = 4
_INT64 = 8
# Of `gpu_ops.greedy` and `gpu_ops.sampling`: logits of a chunk, passes of a search, values of a
# digit. tests compare the sum with the buffers themselves.
_CHUNK, _PASSES, _DIGIT_VALUES = 2048, 16, 16
# Of `gpu_ops.top_k_candidates.TopKLaunch`, and of retrieval attention.
_TOP_K_GROUPS, _TOP_K_SEGMENTS, _MAX_SPLITS = 8192, 16, 128
_MIN_SCORE_TOKENS = 4096
# What torch gives cuBLAS for each stream: 32 MiB on Hopper, 8,320 KiB before.
_CUBLAS_BYTES, _CUBLAS_HOPPER_BYTES = 8320 * 2**10, 32 * 2**20


def num_slots(batch_size: int) -> int:
    """Rows that a step for `batch_size` sequences is made for: a power of two."""
    return 1 << (batch_size - 1).bit_length()


def pages_of(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_tokens)


def page_bytes(num_heads: int, page_tokens: int, head_dim: int, item_bytes: int) -> int:
    """Of a page of `num_heads` KV heads, keys and values."""
    return 2 * num_heads * page_tokens * head_dim * item_bytes


def resident_bytes(
    heads_of_layers: Iterable[int],
    *,
    kv_len: int,
    batch_size: int,
    page_tokens: int,
    head_dim: int,
    item_bytes: int,
) -> int:
    """Of the slabs with all tokens of the KV heads that stay on the GPU (`ResidentKV`).

    Args:
        heads_of_layers: how many of each layer; layers of equally many share slabs.
        kv_len: tokens of each sequence at its end.
    """
    layers_with: dict[int, int] = {}
    for num_heads in heads_of_layers:
        if num_heads:
            layers_with[num_heads] = layers_with.get(num_heads, 0) + 1
    pages = batch_size * pages_of(kv_len, page_tokens)
    return sum(
        whole_slabs(num_layers * pages) * page_bytes(num_heads, page_tokens, head_dim, item_bytes)
        for num_heads, num_layers in layers_with.items()
    )


def window_bytes(
    num_layers: int,
    *,
    slots: int,
    num_kv_heads: int,
    window_tokens: int,
    head_dim: int,
    item_bytes: int,
) -> int:
    """Of sink tokens and recent windows in `num_layers` layers (`ResidentKV.windows`)."""
    return num_layers * slots * page_bytes(num_kv_heads, window_tokens, head_dim, item_bytes)


def page_table_bytes(num_layers: int, *, slots: int, max_context: int, page_tokens: int) -> int:
    """Of addresses of GPU pages, or of host pages, in `num_layers` layers."""
    return num_layers * slots * pages_of(max_context, page_tokens) * _INT64


def gather_bytes(
    num_heads: int, *, slots: int, chosen_tokens: int, head_dim: int, item_bytes: int
) -> int:
    """Of the two buffers of fetched rows, [slots, 2, num_heads, chosen_tokens, head_dim], which
    layers use in turn.

    Args:
        num_heads: the most gathered heads of a layer.
        chosen_tokens: budget_tokens less sinks and recent window.
    """
    return 2 * slots * page_bytes(num_heads, chosen_tokens, head_dim, item_bytes)


def retrieval_bytes(
    num_heads: int,
    *,
    slots: int,
    group_size: int,
    kv_len: int,
    max_context: int,
    budget_tokens: int,
    shared: bool,
    num_kv_heads: int,
) -> int:
    """Of what heads take that retrieve on the GPU; all layers share it (`DeviceHeads`).

    Scores of all tokens, float32 [slots, num_heads, group_size, max_tokens]; scratch of the top-k,
    12 bytes per token and list; and the selections, int32 [slots, units, budget_tokens].

    Args:
        num_heads: the most such heads of a layer.
        shared: they publish one list together.
    """
    if not num_heads:
        return 0
    max_tokens = min(max_context, score_tokens(kv_len))
    lists, units = (1, 1) if shared else (num_heads, num_kv_heads)
    scores = num_heads * group_size * max_tokens * _FLOAT32
    top_k = lists * ((_INT32 + _INT64) * max_tokens + _INT32 * (_TOP_K_GROUPS + _TOP_K_SEGMENTS))
    return slots * (scores + top_k + units * (budget_tokens + 1) * _INT32)


def score_tokens(kv_len: int) -> int:
    """Tokens that scores have room for: it grows with the context, rarely."""
    return max(_MIN_SCORE_TOKENS, 1 << (kv_len - 1).bit_length())


def partial_bytes(
    heads_of_layers: Sequence[int],
    *,
    slots: int,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_multiprocessors: int,
) -> int:
    """Of the splits' results of layers whose heads are on the GPU in part, or publish: at most.

    Args:
        heads_of_layers: how many resident heads each of them has.
    """
    splits = [
        max(1, min(_MAX_SPLITS, 2 * num_multiprocessors // heads))
        for heads in heads_of_layers
        if heads
    ]
    return slots * group_size * num_kv_heads * most(splits) * (head_dim + 1) * _FLOAT32


def step_buffer_bytes(shape: ModelShape, *, slots: int, item_bytes: int, num_splits: int) -> int:
    """Of `StepBuffers` and the linear layers' own buffers on the device.

    Args:
        num_splits: `gpu_ops.paged_attention.num_kv_splits`.
    """
    heads = shape.num_qo_heads * shape.head_dim
    row = 3 * _INT64  # positions and tokens
    row += item_bytes * (shape.hidden_size + 2 * heads)  # hidden, query, attended
    row += 2 * _FLOAT32 * (heads + shape.num_qo_heads)  # the window's part; the host's, if none
    row += _FLOAT32 * shape.num_qo_heads * num_splits * (shape.head_dim + 1)  # splits
    row += _chooser_bytes(shape.vocab_size)
    if slots == 1:
        linear = shape.qkv_width + shape.intermediate_size + shape.vocab_size
    else:
        linear = shape.hidden_size + shape.intermediate_size
    return slots * (row + item_bytes * linear)


def cublas_bytes(capability: tuple[int, int]) -> int:
    """Of cuBLAS's workspace on the stream of decode steps."""
    return _CUBLAS_HOPPER_BYTES if capability[0] == 9 else _CUBLAS_BYTES


def mailbox_bytes(
    shape: ModelShape,
    *,
    slots: int,
    item_bytes: int,
    num_requests: int,
    selection_units: int = 0,
    selection_tokens: int = 0,
) -> int:
    """Of the host memory through which GPU and CPU meet (`Mailbox.allocate`).

    Args:
        selection_units, selection_tokens: of what the GPU's heads publish for the CPU's.
    """
    heads = shape.num_qo_heads * shape.head_dim
    row = item_bytes * heads + _FLOAT32 * (heads + shape.num_qo_heads)
    row += item_bytes * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    row += selection_units * (selection_tokens + 1) * _INT32
    flags = (2 * num_requests + 1) * 16 * _INT32
    return slots * row + flags


def store_bytes(
    shape: ModelShape,
    *,
    kv_len: int,
    batch_size: int,
    page_tokens: int,
    item_bytes: int,
    slab_bytes: int,
) -> int:
    """Of the host store's slabs with `batch_size` sequences that share nothing (`PagePool`)."""
    of_page = page_bytes(shape.num_kv_heads, page_tokens, shape.head_dim, item_bytes)
    slab_pages = max(1, slab_bytes // of_page)
    pages = shape.num_layers * batch_size * pages_of(kv_len, page_tokens)
    num_bytes = -(-pages // slab_pages) * slab_pages * of_page
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _chooser_bytes(vocab_size: int) -> int:
    """Of one row of `TokenChooser`: what it chose, its options, and `SamplingBuffers`."""
    chunks = -(-vocab_size // _CHUNK)
    chosen = 2 * _INT64 + 3 * _FLOAT32  # the token and top_k; temperature, top_p, uniform
    of_chunks = chunks * (2 * _FLOAT32 + _INT64 + _PASSES * _DIGIT_VALUES * _FLOAT32)
    of_passes = _PASSES * (_INT64 + 2 * _FLOAT32) + 2 * _INT64
    return chosen + of_chunks + of_passes


def most(counts: Sequence[int]) -> int:
    """The largest, 0 of none."""
    return max(counts, default=0)
