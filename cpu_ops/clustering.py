"""Checked calls into the clustering kernels (`cpp/operators/clustering.h`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import MAX_GROUP_SIZE, check_head_dim, dtype_code, isa_name
from cpu_ops.worker_pool import WorkerPool

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


def chunk_boxes(
    pool: WorkerPool, keys: Tensor, starts: npt.NDArray[np.int64], *, isa: str | None = None
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Where the rows of chunks of consecutive keys are.

    Args:
        keys: [num_kv_heads, kv_len, head_dim] on the CPU, unit stride in the last dimension.
        starts: int64 [num_chunks + 1], increasing: chunk i holds rows starts[i] to starts[i + 1].

    Returns:
        float32 [num_kv_heads, num_chunks, head_dim], three times: the unit-length mean of a chunk's
        rows; the middle between their mean and the centre of the box that they fill; half of the
        widths of that box.
    """
    code = dtype_code(keys.dtype)
    if keys.dim() != 3 or keys.stride(2) != 1 or keys.device.type != "cpu":
        raise ValueError(
            "keys must be [num_kv_heads, kv_len, head_dim] on the CPU with unit stride in the last"
            f" dimension, got {list(keys.shape)} on {keys.device} with strides {keys.stride()}"
        )
    num_heads, kv_len, head_dim = keys.shape
    check_head_dim(head_dim)
    if len(starts) < 1 or starts[0] < 0 or starts[-1] > kv_len or bool((np.diff(starts) < 1).any()):
        raise ValueError(f"starts must increase within [0, {kv_len}]")
    shape = (num_heads, len(starts) - 1, head_dim)
    points, centres, widths = (np.empty(shape, np.float32) for _ in range(3))
    item = keys.element_size()
    _native.chunk_boxes(
        pool.native,
        isa or isa_name(),
        code,
        keys.data_ptr(),
        num_heads,
        keys.stride(0) * item,
        keys.stride(1) * item,
        head_dim,
        np.ascontiguousarray(starts, np.int64),
        points.ctypes.data,
        centres.ctypes.data,
        widths.ctypes.data,
    )
    return points, centres, widths


def spherical_kmeans(
    pool: WorkerPool,
    points: Float32Array,
    num_clusters: int,
    iterations: int = 10,
    *,
    isa: str | None = None,
) -> tuple[Int32Array, Float32Array]:
    """Cluster unit vectors by their dot product with unit centroids, for all heads at once.

    Starts from points at equal distances; deterministic. No cluster is empty: one that loses all
    its points gets the point that fits its own cluster worst.

    Args:
        points: float32 [num_heads, num_points, head_dim].
        num_clusters: at most num_points.
        iterations: fewer are made where labels stop changing.

    Returns:
        labels int32 [num_heads, num_points], and centroids float32
        [num_heads, num_clusters, head_dim]: the normalised means of the labelled points.
    """
    if points.dtype != np.float32 or points.ndim != 3 or not points.flags.c_contiguous:
        raise ValueError(
            "points must be C-contiguous float32 [num_heads, num_points, head_dim],"
            f" got {points.dtype} {list(points.shape)}"
        )
    num_heads, num_points, width = points.shape
    if not 1 <= num_clusters <= num_points:
        raise ValueError(
            f"num_clusters must be in [1, {num_points}] (the points), got {num_clusters}"
        )
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    labels = np.empty((num_heads, num_points), np.int32)
    centroids = np.empty((num_heads, num_clusters, width), np.float32)
    _native.spherical_kmeans(
        pool.native,
        isa or isa_name(),
        points.ctypes.data,
        num_heads,
        num_points,
        width,
        num_clusters,
        iterations,
        labels.ctypes.data,
        centroids.ctypes.data,
    )
    return labels, centroids


def rank_rows(
    query: Float32Array,
    rows: npt.NDArray[np.int8],
    scales: npt.NDArray[np.uint16],
    spreads: npt.NDArray[np.uint16],
    spread_weight: float,
    *,
    ranges: Int32Array | None = None,
    isa: str | None = None,
) -> Tensor:
    """Each box's rank for its best query: scale * query · c + spread_weight * spread *
    sqrt(sum_d (query_d w_d)^2), where c are the low halves of a row's bytes, -8 to 7, and w the
    high ones, 0 to 15.

    Args:
        query: float32 [num_queries, head_dim], rounded to 1/127 of the largest value of each, and
            their squares to 1/16383 of the largest.
        rows: int8 [n, head_dim], C-contiguous.
        scales, spreads: bits of bfloat16 [n].
        ranges: int32 [num_ranges, 2], first row and end of those to rank; None: all.

    Returns:
        float32 [rows in all ranges]; NaN where a query is not finite, -inf where no query gives a
        number.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_head_dim(query.shape[1])
    if not 1 <= len(query) <= MAX_GROUP_SIZE:
        raise ValueError(f"there must be 1 to {MAX_GROUP_SIZE} queries, got {len(query)}")
    shape = (len(rows), query.shape[1])
    if query.dtype != np.float32 or rows.dtype != np.int8 or rows.shape != shape:
        raise ValueError(
            "expected float32 queries and int8 rows of their width, got"
            f" {query.dtype} {list(query.shape)} and {rows.dtype} {list(rows.shape)}"
        )
    for name, x in (("scales", scales), ("spreads", spreads)):
        if x.dtype != np.uint16 or x.shape != (len(rows),):
            raise ValueError(
                f"expected {name} as uint16 for each of {len(rows)} rows, got"
                f" {x.dtype} {list(x.shape)}"
            )
    if ranges is None:
        ranges = np.array([[0, len(rows)]], np.int32)
    if (ranges < 0).any() or (ranges > len(rows)).any() or (ranges[:, 0] > ranges[:, 1]).any():
        raise ValueError(f"ranges must lie within [0, {len(rows)}], got {ranges.tolist()}")
    query, rows = np.ascontiguousarray(query), np.ascontiguousarray(rows)
    scales, spreads = np.ascontiguousarray(scales), np.ascontiguousarray(spreads)
    ranges = np.ascontiguousarray(ranges, np.int32)
    ranks = torch.empty(int((ranges[:, 1] - ranges[:, 0]).sum()), dtype=torch.float32)
    _native.rank_rows(
        isa or isa_name(),
        query.ctypes.data,
        len(query),
        query.shape[1],
        rows.ctypes.data,
        scales.ctypes.data,
        spreads.ctypes.data,
        spread_weight,
        ranges.ctypes.data,
        len(ranges),
        ranks.data_ptr(),
    )
    return ranks
