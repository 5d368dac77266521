"""The clusters of LycheeCluster's index, found where the keys are: `lychee_index` in torch.

The steps and their order are those of `cpp/clustering.cpp`, so that both find the same clusters but
for rounding. Nothing depends on a value that is on the device, so nothing waits for it; sums run in
a fixed order, so that a prompt has one index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.policies.device_build import WORKSPACE_BYTES, to_device


def cluster_on_device(
    keys: Tensor,
    starts: npt.NDArray[np.int64],
    *,
    num_clusters: int,
    num_units: int,
    iterations: int,
) -> dict[str, Tensor]:
    """The fields of `lychee_index.Clusters`, on the device of `keys`.

    Args:
        keys: [num_kv_heads, kv_len, head_dim].
        starts: int64 [num_chunks + 1], num_chunks >= 1: first token of each chunk, then the end.
    """
    points, norms, spreads = chunk_means(keys, starts)
    labels, fine = spherical_kmeans(points, num_clusters, iterations)
    units, coarse = spherical_kmeans(fine, num_units, iterations)
    # Clusters in the order of their units.
    order = torch.argsort(units, dim=1, stable=True)
    position = torch.empty_like(order)
    position.scatter_(1, order, torch.arange(num_clusters, device=keys.device).expand_as(order))
    labels = position.gather(1, labels)
    units = units.gather(1, order)
    fine = fine.gather(1, order[..., None].expand_as(fine))

    rows, scales = _quantize_rows(torch.cat([coarse, fine], dim=1))
    of_unit = units.gather(1, labels)
    steps = _bfloat16_value(scales)
    radii = torch.maximum(
        _radii(points, labels + num_units, rows, steps), _radii(points, of_unit, rows, steps)
    )
    return {
        "rows": rows,
        "scales": scales.to(torch.int16),  # bits: NumPy reads them as uint16
        "radii": radii,
        "labels": labels.to(torch.int32),
        "units": units.to(torch.int32),
        "norms": norms,
        "spreads": spreads,
    }


def chunk_means(keys: Tensor, starts: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
    """Unit-length means, their norms before, and the largest distances; see `cpu_ops.clustering`.

    One head at a time: in float32 all of them would take as much as two layers of keys and values.
    """
    num_heads, _, head_dim = keys.shape
    first, last = int(starts[0]), int(starts[-1])
    offsets = to_device(starts - first, keys.device)
    tokens = torch.arange(last - first, device=keys.device)
    chunk_of = torch.searchsorted(offsets, tokens, right=True) - 1
    lengths = offsets.diff()[:, None].float()
    means = torch.empty(
        num_heads, len(starts) - 1, head_dim, dtype=torch.float32, device=keys.device
    )
    norms = means.new_empty(means.shape[:2])
    spreads = torch.empty_like(norms)
    for head in range(num_heads):
        rows = keys[head, first:last].float()
        mean = _sum_segments(rows, offsets) / lengths
        norms[head] = mean.double().square().sum(-1).sqrt()
        rows.sub_(mean[chunk_of]).square_()
        squares = torch.segment_reduce(rows.sum(-1, keepdim=True), "max", offsets=offsets)
        spreads[head] = squares[:, 0].sqrt()
        means[head] = _normalized(mean)
    return means, norms, spreads


def spherical_kmeans(points: Tensor, num_clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Labels int64 [heads, n] and unit centroids float32 [heads, num_clusters, head_dim].

    Args:
        points: float32 [heads, n >= num_clusters, head_dim], of unit length.
    """
    num_heads, n, head_dim = points.shape
    first = torch.arange(num_clusters, device=points.device) * n // num_clusters
    centroids = points[:, first]
    labels = torch.empty(num_heads, n, dtype=torch.int64, device=points.device)
    head_offsets = torch.arange(num_heads, device=points.device)[:, None] * num_clusters
    bounds = torch.arange(num_heads * num_clusters + 1, device=points.device)
    for _ in range(iterations):
        nearest, products = _nearest(points, centroids)
        labels = _fill_empty(nearest, products, num_clusters)
        flat, order = torch.sort((labels + head_offsets).flatten(), stable=True)
        offsets = torch.searchsorted(flat, bounds)
        sums = _sum_segments(points.flatten(0, 1)[order], offsets)
        centroids = _normalized(sums).view(num_heads, num_clusters, head_dim)
    return labels, centroids


def _nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each point the centroid of largest dot product, the first of equals, and the product."""
    num_heads, n, _ = points.shape
    labels = torch.empty(num_heads, n, dtype=torch.int64, device=points.device)
    products = torch.empty(num_heads, n, dtype=torch.float32, device=points.device)
    tile = max(1, WORKSPACE_BYTES // (4 * num_heads * centroids.shape[1]))
    for start in range(0, n, tile):
        part = slice(start, start + tile)
        products[:, part], labels[:, part] = (points[:, part] @ centroids.mT).max(dim=-1)
    return labels, products


def _fill_empty(labels: Tensor, products: Tensor, num_clusters: int) -> Tensor:
    """Labels that leave no cluster empty: each takes the worst-fitting point that can be spared.

    In the order of their products, all points of a cluster but its last can be spared. The first
    of them goes to the first empty cluster, and so on.
    """
    order = torch.argsort(products, dim=1, stable=True)  # the worst first
    of_worst = labels.gather(1, order)
    counts = torch.zeros(
        labels.shape[0], num_clusters, dtype=torch.int64, device=labels.device
    ).scatter_add_(1, labels, torch.ones_like(labels))
    # The rank of a point among those of its cluster, in that order.
    by_cluster, position = torch.sort(of_worst, dim=1, stable=True)
    ends = counts.cumsum(1)
    index = torch.arange(labels.shape[1], device=labels.device)
    is_last = torch.empty_like(labels, dtype=torch.bool)
    is_last.scatter_(1, position, index == ends.gather(1, by_cluster) - 1)
    spare = (~is_last).cumsum(1) - 1  # the how manieth that can be spared
    is_empty = counts == 0
    empty = torch.argsort((~is_empty).to(torch.int8), dim=1, stable=True)  # the empty ones first
    moves = ~is_last & (spare < is_empty.sum(1, keepdim=True))
    moved = torch.where(moves, empty.gather(1, spare.clamp(0, num_clusters - 1)), of_worst)
    return torch.empty_like(labels).scatter_(1, order, moved)


def _sum_segments(rows: Tensor, offsets: Tensor) -> Tensor:
    """Sums of rows offsets[i] to offsets[i + 1]. A thread adds up a column: always in one order."""
    return torch.segment_reduce(rows, "sum", offsets=offsets)


def _normalized(x: Tensor) -> Tensor:
    """Rows at unit length; those of no length stay."""
    squares = x.double().square().sum(-1, keepdim=True)
    return x * torch.where(squares > 0, squares.rsqrt(), 1.0).float()


def _bfloat16_up(x: Tensor) -> Tensor:
    """Bits, int32, of the smallest bfloat16 >= x, for x >= 0."""
    return (x.contiguous().view(torch.int32) + 0xFFFF) >> 16


def _bfloat16_value(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows and the bfloat16 bits of their scales: x ~ rows * scale."""
    scales = _bfloat16_up(x.abs().amax(-1) / 127)
    steps = _bfloat16_value(scales)[..., None]
    rows = torch.where(steps > 0, x / steps, 0.0).round()
    return rows.to(torch.int8), scales


def _radii(points: Tensor, labels: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
    """Distance from each dequantised row to the furthest point labelled with it."""
    squares = torch.zeros(rows.shape[:2], dtype=torch.float32, device=points.device)
    of_point: list[Any] = []
    for head in range(len(points)):
        row = rows[head, labels[head]].float() * steps[head, labels[head], None]
        of_point.append((points[head] - row).square_().sum(-1))
    return squares.scatter_reduce_(1, labels, torch.stack(of_point), "amax").sqrt_()
