"""What LycheeCluster keeps of a layer, by the names of its arrays.

    header   HEADER [num_kv_heads]: sizes
    rows     int8 [num_kv_heads, num_units + num_clusters, head_dim]: units first, then the
             clusters, those of a unit one after the other
    scales   uint16 [num_kv_heads, 3, num_units + num_clusters]: bits of scales, of radii, and in
             two bytes the mean norm of the chunks' mean keys before they were scaled to unit
             length (low) and their largest spread (high), in steps of the KV head; one kind after
             the other, so that ranking runs over vectors
    ranges   int32 [num_kv_heads, 2 num_units + 1]: first cluster of each unit, then the end; and
             the number of chunks below each unit
    blocks, offsets  int32 and uint8: where the layer's chunks start, shared by its heads (`chunks`)
    links    uint16 [num_kv_heads, num_clusters + capacity_chunks]: each cluster's newest chunk,
             then each chunk's next older one in its cluster; chunk + 1, 0 ends the list
    links_high  uint8, the same shape: bits 16 to 23, only where the capacity needs them

The others are room for the callbacks to work in and no part of the index: a row for each KV head
(`scratch_rows`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.policies.layouts import StateLayout, record_reader
from offload.policies.lychee_cluster.chunks import BLOCK, MAX_CHUNK_TOKENS

HEADER = np.dtype(
    [
        ("num_chunks", np.int64),
        ("indexed_end", np.int64),  # tokens from here on are in no chunk yet
        ("num_units", np.int64),
        ("num_clusters", np.int64),
        ("capacity_chunks", np.int64),
        ("has_high_links", np.int64),
        ("candidate_capacity", np.int64),
        ("norm_step", np.float32),  # what a norm byte counts
        ("spread_step", np.float32),
    ]
)
# What the last graft changed: the kv_len of its step, or 0, and where; and what was there before:
# here the cluster's first link, in old_header, old_scales and old_rows the rest.
LAST_GRAFT = np.dtype([(name, np.int64) for name in ("kv_len", "unit", "cluster", "link")])
read_header, read_last_graft = record_reader(HEADER), record_reader(LAST_GRAFT)
STATE = StateLayout(
    header=HEADER,
    rows=np.int8,
    scales=np.uint16,
    ranges=np.int32,
    blocks=np.int32,
    offsets=np.uint8,
    links=np.uint16,
    links_high=np.uint8,
    flags=np.uint64,
    query=np.float32,
    keys=np.float32,
    centroids=np.float32,
    scores=np.float32,
    candidates=np.int32,
    picked=np.int32,
    units=np.int32,
    last_graft=LAST_GRAFT,
    old_header=HEADER,
    old_scales=np.uint16,
    old_rows=np.int8,
)
read_state = STATE.read
MAX_UNITS = 64
UNITS_LENGTH = 256  # of `units`, which `views` names


def starts_bytes(capacity_chunks: int) -> int:
    """Of block starts, then one offset for each chunk and for the end."""
    return 4 * (capacity_chunks // BLOCK + 1) + capacity_chunks + 1


def scratch_rows(
    num_clusters: int, capacity_chunks: int, candidate_capacity: int, head_dim: int
) -> dict[str, tuple[npt.DTypeLike, int]]:
    """dtype and length of a KV head's row of each array that is no part of the index."""
    return {
        "flags": (np.uint64, capacity_chunks // 64 + 1),  # chunks that a search has found
        "query": (np.float32, head_dim),  # the group's sum; a new chunk's key
        "keys": (np.float32, head_dim * MAX_CHUNK_TOKENS),  # of a new chunk
        "centroids": (np.float32, 2 * head_dim),  # before and after it
        "scores": (np.float32, max(num_clusters, MAX_UNITS)),
        "candidates": (np.int32, candidate_capacity + MAX_CHUNK_TOKENS),  # chunks whole
        "picked": (np.int32, num_clusters),
        "units": (np.int32, UNITS_LENGTH),
        "last_graft": (LAST_GRAFT, 1),
        "old_header": (HEADER, 1),
        "old_scales": (np.uint16, 2 * 3),  # of the unit and of the cluster, three kinds
        "old_rows": (np.int8, 2 * head_dim),  # theirs
    }


def scratch_bytes(
    num_clusters: int, capacity_chunks: int, candidate_capacity: int, head_dim: int
) -> int:
    """Of one KV head."""
    rows = scratch_rows(num_clusters, capacity_chunks, candidate_capacity, head_dim)
    return sum(np.dtype(dtype).itemsize * length for dtype, length in rows.values())
