"""The groups of LycheeCluster's index, found where the keys are: `index` on a device.

The steps and their order are those of `cpp/operators/clustering.cpp`, so that both find the same
clusters but for rounding. Nothing depends on a value that is on the device, so nothing waits for
it; sums come to the same in any order, so that a prompt has one index. The launches of a layer are
counted in tests: more than a few hundred would keep a GPU busy with starting them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.chunk_clusters import chunk_boxes, fill_empty, mean_directions
from offload.policies.lychee_cluster.index import (
    Groups,
    IndexShape,
    chunks_of_units,
)
from offload.selection.device_build import WORKSPACE_BYTES, to_device


def group_on_device(keys: Tensor, shape: IndexShape, iterations: int) -> Groups:
    """The groups of `shape.num_chunks` >= 1 chunks, on the device of the keys.

    Args:
        keys: [num_kv_heads, kv_len, head_dim].
    """
    points, centres, widths = chunk_boxes(keys, to_device(shape.starts, keys.device))
    units, _ = spherical_kmeans(points, shape.num_units, iterations)
    return chunks_of_units(centres, widths, units, shape.num_units)


def spherical_kmeans(points: Tensor, num_clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Labels int64 [heads, n] and unit centroids float32 [heads, num_clusters, head_dim].

    Args:
        points: float32 [heads, n >= num_clusters, head_dim], of unit length.
    """
    num_heads, n, _ = points.shape
    first = torch.arange(num_clusters, device=points.device) * n // num_clusters
    centroids = points.index_select(1, first)
    labels = torch.empty(num_heads, n, dtype=torch.int64, device=points.device)
    products = torch.empty(num_heads, n, dtype=torch.float32, device=points.device)
    sums = torch.zeros(centroids.shape, dtype=torch.int64, device=points.device)
    for _ in range(iterations):
        _nearest(points, centroids, labels, products)
        fill_empty(labels, products, num_clusters)
        mean_directions(points, labels, sums, centroids)
    return labels, centroids


def _nearest(points: Tensor, centroids: Tensor, labels: Tensor, products: Tensor) -> None:
    """Finds each point's centroid of largest dot product, the first of equals, and the product.

    Args:
        labels, products: out [heads, n], int64 and float32.
    """
    num_heads, n, _ = points.shape
    tile = max(1, WORKSPACE_BYTES // (4 * num_heads * centroids.shape[1]))
    for start in range(0, n, tile):
        part = slice(start, start + tile)
        out = products[:, part], labels[:, part]
        torch.max(points[:, part] @ centroids.mT, -1, out=out)
