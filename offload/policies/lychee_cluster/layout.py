"""What LycheeCluster keeps of a layer, by the names of its arrays.

Chunks are ranked in an order of their own: those of a coarse unit one after the other, then those
grafted since. A chunk's *place* is its number in that order.

    header   HEADER [num_kv_heads]: sizes
    rows     int8 [num_kv_heads, num_units + capacity_chunks, head_dim]: the units first, then the
             chunks by place: boxes, whose bytes hold the centre in the low half (-CENTRE_STEPS to
             CENTRE_STEPS) and the half-width in the high one (0 to WIDTH_STEPS)
    scales   uint16 [num_kv_heads, 2, num_units + capacity_chunks]: bits of the rows' scales; and of
             the widths'
    ranges   int32 [num_kv_heads, num_units + 1]: first place of each unit, then the end
    blocks, offsets  int32 and uint8: where the layer's chunks start, shared by its heads (`chunks`)
    order    uint16 [num_kv_heads, capacity_chunks]: the chunk at each place
    order_high  uint8, the same shape: bits 16 to 23, only where the capacity needs them
    carried  int32 [num_kv_heads, 2, 2 + carried_tokens]: kv_len of a step (every other one has a
             row of its own, so that one that fails leaves what the next has to read), how many
             tokens it carried, and these, ascending

The others are room for the callbacks to work in and no part of the index: a row for each KV head
(`scratch_rows`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.policies.lychee_cluster.chunks import BLOCK, MAX_CHUNK_TOKENS
from offload.selection.layouts import StateLayout, record_reader

HEADER = np.dtype(
    [
        ("num_chunks", np.int64),
        ("indexed_end", np.int64),  # tokens from here on are in no chunk yet
        ("num_units", np.int64),
        ("capacity_chunks", np.int64),
        ("has_high_order", np.int64),
        ("candidate_capacity", np.int64),
        ("carried_tokens", np.int64),
    ]
)
MAX_UNITS = 128
CENTRE_STEPS, WIDTH_STEPS = 7, 15
UNITS_LENGTH = 4 * MAX_UNITS + 32  # of `units`, which `views` names


def scratch_rows(
    capacity_chunks: int, candidate_capacity: int, head_dim: int
) -> dict[str, tuple[npt.DTypeLike, int]]:
    """dtype and length of a KV head's row of each array that is no part of the index."""
    return {
        "flags": (np.uint64, capacity_chunks // 64 + 1),  # chunks that a search has found
        "keys": (np.float32, head_dim * MAX_CHUNK_TOKENS),  # of a new chunk
        "mean": (np.float32, head_dim),  # theirs
        "scores": (np.float32, max(capacity_chunks, MAX_UNITS)),
        "candidates": (np.int32, candidate_capacity + MAX_CHUNK_TOKENS),  # chunks whole
        "picked": (np.int32, max(capacity_chunks, candidate_capacity)),
        "units": (np.int32, UNITS_LENGTH),
        "last_graft": (np.uint64, 1),  # the kv_len of its step, or 0
        "old_header": (HEADER, 1),  # before it
    }


read_header = record_reader(HEADER)
STATE = StateLayout(
    header=HEADER,
    rows=np.int8,
    scales=np.uint16,
    ranges=np.int32,
    blocks=np.int32,
    offsets=np.uint8,
    order=np.uint16,
    order_high=np.uint8,
    carried=np.int32,
    **{name: dtype for name, (dtype, _) in scratch_rows(0, 0, 0).items()},
)
read_state = STATE.read


def starts_bytes(capacity_chunks: int) -> int:
    """Bytes of block starts, then of one offset for each chunk and for the end."""
    return 4 * (capacity_chunks // BLOCK + 1) + capacity_chunks + 1


def scratch_bytes(capacity_chunks: int, candidate_capacity: int, head_dim: int) -> int:
    """Bytes of the scratch rows of one KV head."""
    rows = scratch_rows(capacity_chunks, candidate_capacity, head_dim)
    return sum(np.dtype(dtype).itemsize * length for dtype, length in rows.values())
