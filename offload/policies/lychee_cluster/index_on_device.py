"""The clusters of LycheeCluster's index, found where the keys are: `index` on a device.

The steps and their order are those of `cpp/operators/clustering.cpp`, so that both find the same
clusters but for rounding. Nothing depends on a value that is on the device, so nothing waits for
it; sums come to the same in any order, so that a prompt has one index. The launches of a layer are
counted in tests: more than a few hundred would keep a GPU busy with starting them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_ops.chunk_clusters import chunk_means, covering_radii, fill_empty, mean_directions
from offload.policies.device_build import WORKSPACE_BYTES, to_device


def cluster_on_device(
    keys: Tensor,
    starts: npt.NDArray[np.int64],
    *,
    num_clusters: int,
    num_units: int,
    iterations: int,
) -> dict[str, Tensor]:
    """The fields of `index.Clusters`, on the device of `keys`.

    Args:
        keys: [num_kv_heads, kv_len, head_dim].
        starts: int64 [num_chunks + 1], num_chunks >= 1: first token of each chunk, then the end.
    """
    points, norms, spreads = chunk_means(keys, to_device(starts, keys.device))
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
    radii = covering_radii(points, labels, units, rows, _bfloat16_value(scales))
    return {
        "rows": rows,
        "scales": scales.to(torch.int16),  # bits: NumPy reads them as uint16
        "radii": radii,
        "labels": labels.to(torch.int32),
        "units": units.to(torch.int32),
        "norms": norms,
        "spreads": spreads,
    }


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
    """Of each point the centroid of largest dot product, the first of equals, and the product.

    Args:
        labels, products: out [heads, n], int64 and float32.
    """
    num_heads, n, _ = points.shape
    tile = max(1, WORKSPACE_BYTES // (4 * num_heads * centroids.shape[1]))
    for start in range(0, n, tile):
        part = slice(start, start + tile)
        out = products[:, part], labels[:, part]
        torch.max(points[:, part] @ centroids.mT, -1, out=out)


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
