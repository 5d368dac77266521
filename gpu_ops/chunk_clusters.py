"""Steps of clustering a layer's chunks of keys: few launches, none of which the host waits for.

torch's own operators take over a thousand launches for an index of LycheeCluster, most of them for
sorts that only group rows. Here sums go to their cluster by atomic additions of integers, which
come to the same in any order, so that a prompt has one index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_tensor
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, runs_kernel, tl

_POINTS = 16  # points of a program
_SCAN = 2048  # points or clusters that a program of `fill_empty` looks at together
# Of sums: those of 2**22 rows of unit length fit an int64.
_FIXED_POINT = float(1 << 40)


@jit_for_any("head_stride", "num_chunks")
def chunk_boxes_kernel(
    keys: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    starts: tl.tensor,
    points: tl.tensor,
    centres: tl.tensor,
    widths: tl.tensor,
    num_chunks: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """One program per chunk and head."""
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    d, t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    inside = d < HEAD_DIM
    rows = keys + head * head_stride + d[None, :]
    total = tl.zeros([BLOCK_D], tl.float32)
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    for token in range(first, last, BLOCK_T):
        there = (token + t < last)[:, None]
        at = rows + (token + t)[:, None] * token_stride
        x = tl.load(at, mask=there & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(x, 0)
        low = tl.minimum(low, tl.min(tl.where(there, x, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(there, x, float("-inf")), 0))
    mean = total / (last - first).to(tl.float32)
    squares = tl.sum(mean * mean, 0)
    out = (head * num_chunks + chunk) * HEAD_DIM + d
    tl.store(points + out, mean / tl.where(squares > 0, tl.sqrt(squares), 1.0), mask=inside)
    tl.store(centres + out, 0.5 * mean + 0.25 * (low + high), mask=inside)
    tl.store(widths + out, 0.5 * (high - low), mask=inside)


def chunk_boxes(keys: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of chunks of consecutive keys are.

    Args:
        keys: [num_kv_heads, kv_len, head_dim]; any strides but a unit stride in the last dimension.
        starts: int64 [num_chunks + 1], on the device: first token of each chunk, then the end.

    Returns:
        float32 [num_kv_heads, num_chunks, head_dim], three times: the unit-length mean of a chunk's
        rows; the middle between their mean and the centre of the box that they fill; half of the
        widths of that box.
    """
    check_dtype("keys", keys)
    num_heads, _, head_dim = keys.shape
    num_chunks = len(starts) - 1
    check_tensor("starts", starts, (num_chunks + 1,), torch.int64, keys.device)
    if keys.stride(2) != 1:
        raise ValueError(f"rows of keys must be contiguous, got strides {keys.stride()}")
    if not runs_kernel(keys):
        return chunk_boxes_reference(keys, starts)
    points = keys.new_empty(num_heads, num_chunks, head_dim, dtype=torch.float32)
    centres, widths = torch.empty_like(points), torch.empty_like(points)
    chunk_boxes_kernel[(num_chunks, num_heads)](
        keys,
        *keys.stride()[:2],
        starts,
        points,
        centres,
        widths,
        num_chunks,
        head_dim,
        next_power_of_2(head_dim),
        16,
        num_warps=2,
    )
    return points, centres, widths


def chunk_boxes_reference(keys: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_boxes` by torch."""
    first, last = int(starts[0]), int(starts[-1])
    lengths = starts.diff()
    chunk_of = torch.repeat_interleave(lengths)
    rows = keys[:, first:last].double()
    shape = (len(keys), len(lengths), keys.shape[2])
    means = rows.new_zeros(shape).index_add_(1, chunk_of, rows) / lengths[:, None]
    of_row = chunk_of[None, :, None].expand_as(rows)
    low, high = (
        rows.new_empty(shape).scatter_reduce_(1, of_row, rows, extreme, include_self=False)
        for extreme in ("amin", "amax")
    )
    norms = means.norm(dim=-1, keepdim=True)
    points = means / torch.where(norms > 0, norms, 1.0)
    boxes = means / 2 + (low + high) / 4, (high - low) / 2
    return points.float(), boxes[0].float(), boxes[1].float()


@jit_for_any("n", "num_clusters")
def fill_empty_kernel(
    labels: tl.tensor,
    products: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    num_clusters: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per head: its threads agree on each move before the next."""
    head = tl.program_id(0).to(tl.int64)
    labels += head * n
    products += head * n
    counts += head * num_clusters
    offset = tl.arange(0, BLOCK)
    for first in range(0, num_clusters, BLOCK):
        c = first + offset
        tl.store(counts + c, tl.zeros([BLOCK], tl.int32), mask=c < num_clusters)
    tl.debug_barrier()
    for first in range(0, n, BLOCK):
        inside = first + offset < n
        label = tl.load(labels + first + offset, mask=inside, other=0)
        tl.atomic_add(counts + label, tl.full([BLOCK], 1, tl.int32), mask=inside, sem="relaxed")
    tl.debug_barrier()
    for first in range(0, num_clusters, BLOCK):
        c = first + offset
        size = tl.load(counts + c, mask=c < num_clusters, other=1, volatile=True)
        empty = (size == 0).to(tl.int32)
        for _ in range(tl.sum(empty, 0)):
            _, index = tl.max(empty, 0, return_indices=True)  # the first of them
            empty = tl.where(offset == index, 0, empty)
            smallest, worst = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
            for start in range(0, n, BLOCK):
                p = start + offset
                label = tl.load(labels + p, mask=p < n, other=0, volatile=True)
                size = tl.load(counts + label, mask=p < n, other=0, volatile=True)
                x = tl.load(products + p, mask=size > 1, other=float("inf"))
                least, at = tl.min(x, 0, return_indices=True)
                worst = tl.where(least < smallest, start + at, worst)
                smallest = tl.minimum(least, smallest)
            source = tl.load(labels + worst, volatile=True)
            size_left = tl.load(counts + source, volatile=True) - 1
            tl.debug_barrier()  # everybody has read
            tl.store(counts + source, size_left)
            tl.store(counts + first + index, 1)
            tl.store(labels + worst, (first + index).to(tl.int64))
            tl.debug_barrier()


def fill_empty(labels: Tensor, products: Tensor, num_clusters: int) -> None:
    """Change labels so that no cluster is empty: each takes the worst-fitting point to be spared.

    One empty cluster after the other takes the point of the smallest product (the first of equals)
    whose own cluster has more points than it.

    Args:
        labels: int64 [heads, n >= num_clusters], changed in place.
        products: float32 [heads, n], of each point and its centroid.
    """
    check_tensor("labels", labels, labels.shape, torch.int64, labels.device)
    check_tensor("products", products, labels.shape, torch.float32, labels.device)
    num_heads, n = labels.shape
    if not num_clusters <= n:
        raise ValueError(f"{n} points cannot fill {num_clusters} clusters")
    if not runs_kernel(labels):
        return fill_empty_reference(labels, products, num_clusters)
    counts = labels.new_empty(num_heads, num_clusters, dtype=torch.int32)
    fill_empty_kernel[(num_heads,)](labels, products, counts, n, num_clusters, _SCAN, num_warps=8)


def fill_empty_reference(labels: Tensor, products: Tensor, num_clusters: int) -> None:
    """`fill_empty` by torch."""
    for of_head, fits in zip(labels, products, strict=True):
        counts = torch.bincount(of_head, minlength=num_clusters)
        order = iter(torch.argsort(fits, stable=True).tolist())
        for cluster in torch.nonzero(counts == 0).flatten().tolist():
            point = next(p for p in order if counts[of_head[p]] > 1)
            counts[of_head[point]] -= 1
            counts[cluster] = 1
            of_head[point] = cluster


@jit_for_any("n", "num_clusters")
def add_points_kernel(
    points: tl.tensor,
    labels: tl.tensor,
    sums: tl.tensor,
    n: tl.tensor,
    num_clusters: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """One program per BLOCK_N points of a head."""
    head = tl.program_id(1).to(tl.int64)
    i, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    label = tl.load(labels + head * n + i, mask=i < n, other=0)
    inside = (i < n)[:, None] & (d < HEAD_DIM)[None, :]
    row = (head * n + i) * HEAD_DIM
    x = tl.load(points + row[:, None] + d[None, :], mask=inside, other=0.0)
    fixed = (x.to(tl.float64) * SCALE).to(tl.int64)
    target = (head * num_clusters + label) * HEAD_DIM
    tl.atomic_add(sums + target[:, None] + d[None, :], fixed, mask=inside, sem="relaxed")


@jit
def normalize_sums_kernel(
    sums: tl.tensor,
    centroids: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """One program per cluster; it leaves zeros, for the next sums."""
    row = tl.program_id(0).to(tl.int64) * HEAD_DIM
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    x = tl.load(sums + row + d, mask=inside, other=0).to(tl.float64) / SCALE
    squares = tl.sum(x * x, 0)
    x = x / tl.where(squares > 0, tl.sqrt(squares), 1.0)
    tl.store(centroids + row + d, x.to(tl.float32), mask=inside)
    tl.store(sums + row + d, tl.zeros([BLOCK_D], tl.int64), mask=inside)


def mean_directions(points: Tensor, labels: Tensor, sums: Tensor, centroids: Tensor) -> None:
    """centroids = the sums of each cluster's points, at unit length; a sum of no length stays.

    Args:
        points: float32 [heads, n, head_dim], of at most unit length.
        labels: int64 [heads, n].
        sums: int64 [heads, num_clusters, head_dim], scratch: zeros, before and after.
        centroids: out float32, shaped as `sums`.
    """
    num_heads, n, head_dim = points.shape
    num_clusters = sums.shape[1]
    check_tensor("points", points, (num_heads, n, head_dim), torch.float32, points.device)
    check_tensor("labels", labels, (num_heads, n), torch.int64, points.device)
    shape = (num_heads, num_clusters, head_dim)
    check_tensor("sums", sums, shape, torch.int64, points.device)
    check_tensor("centroids", centroids, shape, torch.float32, points.device)
    if not runs_kernel(points):
        return mean_directions_reference(points, labels, centroids)
    block_d = next_power_of_2(head_dim)
    add_points_kernel[(-(-n // _POINTS), num_heads)](
        points, labels, sums, n, num_clusters, head_dim, block_d, _POINTS, _FIXED_POINT, num_warps=4
    )
    normalize_sums_kernel[(num_heads * num_clusters,)](
        sums, centroids, head_dim, block_d, _FIXED_POINT, num_warps=1
    )


def mean_directions_reference(points: Tensor, labels: Tensor, centroids: Tensor) -> None:
    """`mean_directions` by torch."""
    for head, of_head in enumerate(points.double()):
        sums = of_head.new_zeros(centroids.shape[1:]).index_add_(0, labels[head], of_head)
        squares = sums.square().sum(-1, keepdim=True)
        centroids[head] = sums * torch.where(squares > 0, squares.rsqrt(), 1.0)
