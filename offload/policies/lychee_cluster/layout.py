"""What LycheeCluster keeps of a layer, by the names of its arrays.

    header   int64 [num_kv_heads, HEADER_COLUMNS]: sizes
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

from offload.policies.layouts import StateLayout
from offload.policies.lychee_cluster.chunks import BLOCK, MAX_CHUNK_TOKENS

STATE = StateLayout(
    header=np.int64,
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
    last_graft=np.int64,
    old_rows=np.int8,
)
read_state = STATE.read
MAX_UNITS = 64
UNITS_LENGTH = 256  # of `units`, which `views` names
# The columns of `header`.
NUM_CHUNKS = 0
INDEXED_END = 1  # tokens from here on are in no chunk yet
NUM_UNITS = 2
NUM_CLUSTERS = 3
CAPACITY_CHUNKS = 4
HAS_HIGH_LINKS = 5
CANDIDATE_CAPACITY = 6
NORM_STEP = 7  # bits of a float32: what a norm byte counts
SPREAD_STEP = 8
HEADER_COLUMNS = 9
# The columns of `last_graft`: the kv_len of its step, or 0; its unit and cluster; and what was
# there before: the header, the cluster's first link, three kinds of scales of the unit and of
# the cluster, whose rows are in `old_rows`.
GRAFTED_AT, GRAFTED_UNIT, GRAFTED_CLUSTER = 0, 1, 2
OLD_HEADER, OLD_LINK, OLD_SCALES = 3, 3 + HEADER_COLUMNS, 4 + HEADER_COLUMNS
LAST_GRAFT_COLUMNS = OLD_SCALES + 6


def starts_bytes(capacity_chunks: int) -> int:
    """Of block starts, then one offset for each chunk and for the end."""
    return 4 * (capacity_chunks // BLOCK + 1) + capacity_chunks + 1


def scratch_rows(
    num_clusters: int, capacity_chunks: int, candidate_capacity: int, head_dim: int
) -> dict[str, tuple[type[np.generic], int]]:
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
        "last_graft": (np.int64, LAST_GRAFT_COLUMNS),
        "old_rows": (np.int8, 2 * head_dim),
    }


def scratch_bytes(
    num_clusters: int, capacity_chunks: int, candidate_capacity: int, head_dim: int
) -> int:
    """Of one KV head."""
    rows = scratch_rows(num_clusters, capacity_chunks, candidate_capacity, head_dim)
    return sum(np.dtype(dtype).itemsize * length for dtype, length in rows.values())
