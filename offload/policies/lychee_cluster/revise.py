"""Chunks of LycheeCluster's index whose keys were written anew.

They end where they did: the text is the same. Each gets its box anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.policies.lychee_cluster.chunks import BLOCK_SHIFT, chunk_start
from offload.policies.lychee_cluster.graft import forget_graft, mean_key, write_box
from offload.policies.lychee_cluster.views import chunk_at
from offload.selection.compiled import cached_njit
from offload.selection.layer_state import State
from offload.selection.revised import Revised


@cached_njit(nogil=True)
def _rank(keys: Any, starts: Any, first: int, index: Any, sizes: Any) -> None:
    """Rank the chunks from `first` on by the keys of the tokens starts[0] .. starts[-1] that they
    are of.

    Args:
        keys: [num_kv_heads, n * head_dim].
        index: `rows`, `scales`, `order` and `order_high` of the arrays.
        sizes: units, chunks, whether the order has a high part.
    """
    all_rows, all_scales, order, order_high = index
    num_units, num_chunks, has_high_order = sizes
    width, no_high = all_rows.shape[2], np.zeros(0, np.uint8)
    mean = np.empty(width, np.float32)
    for h in range(len(keys)):
        rows, scales = all_rows[h], all_scales[h]
        high = order_high[h] if has_high_order else no_high
        for place in range(num_chunks):
            i = chunk_at(order[h], high, place) - first
            if i < 0:
                continue
            length = starts[i + 1] - starts[i]
            flat = keys[h, (starts[i] - starts[0]) * width :]
            mean_key(flat, length, mean)
            row = num_units + place
            write_box(flat, length, mean, rows[row], scales[:, row])


def compile_rank() -> None:
    """Have it ready for arrays as they are: here it ranks nothing."""
    rows, scales = np.zeros((1, 1, 8), np.int8), np.zeros((1, 2, 1), np.uint16)
    index = (rows, scales, np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.uint8))
    _rank(np.zeros((1, 0), np.float32), np.zeros(1, np.int64), 0, index, (0, 0, 0))


def revise_chunks(arrays: State, revised: Revised) -> None:
    """Rank the chunks that end after `revised.first` by the keys that they have now."""
    forget_graft(arrays)
    header, blocks, offsets = arrays["header"][0], arrays["blocks"], arrays["offsets"]
    chunk = num_chunks = int(header["num_chunks"])
    while chunk > 0 and chunk_start(blocks, offsets, chunk) > revised.first:
        chunk -= 1
    if chunk == num_chunks:
        return
    ends = np.arange(chunk, num_chunks + 1)
    starts = blocks[ends >> BLOCK_SHIFT] + offsets[ends].astype(np.int64)
    keys = revised.load_keys(int(starts[0])).float().flatten(1).numpy()
    index = tuple(arrays[name] for name in ("rows", "scales", "order", "order_high"))
    sizes = ("num_units", "num_chunks", "has_high_order")
    _rank(keys, starts, chunk, index, tuple(int(header[name]) for name in sizes))
