"""LycheeCluster's index of one layer: coarse units -> fine clusters -> chunks, for every KV head.

Centroids are int8 rows with a bfloat16 scale, each with a bfloat16 covering radius, rounded up.
Radii are measured from the *dequantised* centroid, so that for every chunk key v (the unit-length
mean of a chunk's keys) below a centroid mu and every query q

    q·v <= q·mu + |q| radius                                   (arXiv 2603.08453, eq. 2)

holds for the numbers stored. The arrays: `layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from cpu_ops.clustering import chunk_means, spherical_kmeans
from offload.policies.base import BuildContext, State
from offload.policies.lychee_cluster.chunks import BLOCK, chunk_start, set_chunk_start
from offload.policies.lychee_cluster.layout import (
    HEADER,
    scratch_rows,
)

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
_LOW_LINKS = 1 << 16
FIXED = ("header", "rows", "scales", "ranges")  # whatever the capacity


def bfloat16_up(x: Float32Array) -> npt.NDArray[np.uint16]:
    """Bits of the smallest bfloat16 >= x, for x >= 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up: npt.NDArray[np.uint16] = ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    return up


def bfloat16_value(bits: npt.NDArray[np.uint16]) -> Float32Array:
    """float32 of bfloat16 bits."""
    value: Float32Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return value


def quantize_rows(x: Float32Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]:
    """int8 rows and the bfloat16 bits of their scales: x ~ rows * scale."""
    scales = bfloat16_up(np.abs(x).max(axis=-1) / 127)
    steps = bfloat16_value(scales)[..., None]
    rows = np.rint(np.divide(x, steps, out=np.zeros_like(x), where=steps > 0))
    return rows.astype(np.int8), scales


def encode_bytes(x: Float32Array, steps: Float32Array) -> npt.NDArray[np.uint16]:
    """x [heads, n] in whole steps [heads] of at most 255, rounded up."""
    steps = np.where(steps > 0, steps, 1)[:, None]
    codes: npt.NDArray[np.uint16] = np.clip(np.ceil(x / steps), 0, 255).astype(np.uint16)
    return codes


@numba.njit(cache=True)
def _radii(points: Any, labels: Any, rows: Any, steps: Any) -> Any:
    """Distance from each dequantised row to the furthest point labelled with it, per head."""
    heads, n, width = points.shape
    squares = np.zeros((heads, rows.shape[1]), np.float32)
    for h in range(heads):
        for i in range(n):
            c = labels[h, i]
            total = np.float32(0)
            for d in range(width):
                off = points[h, i, d] - np.float32(rows[h, c, d]) * steps[h, c]
                total += off * off
            squares[h, c] = max(squares[h, c], total)
    return np.sqrt(squares)


@numba.njit(cache=True)
def _link(labels: Any, num_clusters: int, links: Any) -> None:
    for h in range(labels.shape[0]):
        for i in range(labels.shape[1]):
            c = labels[h, i]
            links[h, num_clusters + i] = links[h, c]
            links[h, c] = i + 1


@numba.njit(cache=True)
def _write_starts(blocks: Any, offsets: Any, starts: Any) -> None:
    for i in range(len(starts)):
        set_chunk_start(blocks, offsets, i, starts[i])


def padded_radius(radius: Float32Array) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of a radius that holds in spite of float32 rounding."""
    return bfloat16_up(radius * np.float32(1 + 1e-5) + np.float32(1e-6))


@dataclass(frozen=True)
class Clusters:
    """What clustering a layer's chunks has found; units and clusters of a head share `rows`.

    Attributes:
        rows, scales: quantised centroids [heads, num_units + num_clusters, head_dim], their scales'
            bits.
        radii: float32 [heads, num_units + num_clusters].
        labels: int32 [heads, num_chunks], the cluster of each chunk.
        units: int32 [heads, num_clusters], ascending: the unit of each cluster.
        norms, spreads: float32 [heads, num_chunks], of `chunk_means`.
    """

    rows: npt.NDArray[np.int8]
    scales: npt.NDArray[np.uint16]
    radii: Float32Array
    labels: Array
    units: Array
    norms: Float32Array
    spreads: Float32Array


@dataclass(frozen=True)
class IndexShape:
    """How many chunks, clusters and units a layer's index has, and what it leaves room for."""

    starts: npt.NDArray[np.int64]  # first token of each chunk, then the end
    num_clusters: int
    num_units: int
    capacity_chunks: int
    candidate_capacity: int

    @property
    def num_chunks(self) -> int:
        return len(self.starts) - 1


def cluster_chunks(context: BuildContext, shape: IndexShape, iterations: int) -> Clusters:
    """Cluster the chunks of a layer's keys on the CPU, and the clusters into units."""
    if not shape.num_chunks:
        return no_clusters(context.keys.shape[0], context.keys.shape[2])
    points, norms, spreads = chunk_means(context.pool, context.keys, shape.starts)
    labels, fine = spherical_kmeans(context.pool, points, shape.num_clusters, iterations)
    units, coarse = spherical_kmeans(context.pool, fine, shape.num_units, iterations)
    # Clusters in the order of their units.
    order = np.argsort(units, axis=1, kind="stable")
    position = np.empty_like(labels, shape=order.shape)
    np.put_along_axis(position, order, np.arange(shape.num_clusters)[None], axis=1)
    labels = np.take_along_axis(position, labels, axis=1)
    units = np.take_along_axis(units, order, axis=1)
    fine = np.take_along_axis(fine, order[..., None], axis=1)

    rows, scales = quantize_rows(np.concatenate([coarse, fine], axis=1))
    steps = bfloat16_value(scales)
    of_unit = np.take_along_axis(units, labels, axis=1)
    radii = np.maximum(
        _radii(points, labels + shape.num_units, rows, steps), _radii(points, of_unit, rows, steps)
    )
    return Clusters(rows, scales, radii, labels, units, norms, spreads)


def no_clusters(num_heads: int, head_dim: int) -> Clusters:
    """One empty cluster, which the first chunk will fill, in one unit."""
    of_chunks = np.zeros((num_heads, 0), np.float32)
    return Clusters(
        rows=np.zeros((num_heads, 2, head_dim), np.int8),
        scales=np.zeros((num_heads, 2), np.uint16),
        radii=np.zeros((num_heads, 2), np.float32),
        labels=np.zeros((num_heads, 0), np.int32),
        units=np.zeros((num_heads, 1), np.int32),
        norms=of_chunks,
        spreads=of_chunks,
    )


def index_arrays(clusters: Clusters, shape: IndexShape) -> State:
    """The arrays of a layer's index."""
    labels, units, rows = clusters.labels, clusters.units, clusters.rows
    heads, num_units = len(rows), shape.num_units
    of_unit = np.take_along_axis(units, labels, axis=1)
    ranges = np.zeros((heads, 2 * num_units + 1), np.int32)
    for h in range(heads):
        ranges[h, : num_units + 1] = np.searchsorted(units[h], np.arange(num_units + 1))
        ranges[h, num_units + 1 :] = np.bincount(of_unit[h], minlength=num_units)

    header = np.zeros(heads, HEADER)
    mean_norms, max_spreads = _norms_and_spreads(
        clusters.norms, clusters.spreads, labels, of_unit, rows.shape[:2]
    )
    # Half as much again as the largest there is, for what is to come.
    norm_steps, spread_steps = (
        1.5 / 255 * x.max(axis=1, initial=0).astype(np.float32)
        for x in (clusters.norms, clusters.spreads)
    )
    header["norm_step"], header["spread_step"] = norm_steps, spread_steps
    codes = encode_bytes(mean_norms, norm_steps) | encode_bytes(max_spreads, spread_steps) << 8
    header["num_chunks"] = shape.num_chunks
    header["indexed_end"] = shape.starts[-1]
    header["num_units"] = num_units
    header["num_clusters"] = shape.num_clusters
    header["candidate_capacity"] = shape.candidate_capacity
    links = np.zeros((heads, shape.num_clusters + shape.capacity_chunks), np.int32)
    _link(labels, shape.num_clusters, links)
    scales = np.stack([clusters.scales, padded_radius(clusters.radii), codes], axis=1)
    arrays: State = {"header": header, "rows": rows, "scales": scales, "ranges": ranges}
    return _with_room(arrays, shape.starts, links, shape.capacity_chunks)


def _norms_and_spreads(
    norms: Float32Array,
    spreads: Float32Array,
    labels: Array,
    of_unit: Array,
    shape: tuple[int, ...],
) -> tuple[Float32Array, Float32Array]:
    """Mean norm and largest spread of the chunks below each row, [heads, units + clusters]."""
    means, largest = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    num_units = shape[1] - max(1, int(labels.max(initial=0)) + 1)
    for h in range(shape[0]):
        for rows in (of_unit[h], labels[h] + num_units):
            counts = np.bincount(rows, minlength=shape[1])
            means[h] += np.bincount(rows, norms[h], shape[1]) / np.maximum(counts, 1)
            np.maximum.at(largest[h], rows, spreads[h])
    return means, largest


def room_for(indexed_end: int, capacity_tokens: int, min_chunk_tokens: int) -> int:
    """Chunks that tokens up to the capacity may still make."""
    return max(0, capacity_tokens - indexed_end) // min_chunk_tokens + 1


def _with_room(
    arrays: State,
    starts: npt.NDArray[np.int64],
    links: npt.NDArray[np.int32],
    capacity_chunks: int,
) -> State:
    """`arrays` with these chunks, and with everything whose size depends on their capacity."""
    header, rows = arrays["header"], arrays["rows"]
    high = capacity_chunks + 1 >= _LOW_LINKS
    header["capacity_chunks"] = capacity_chunks
    header["has_high_links"] = high
    scratch = scratch_rows(
        int(header["num_clusters"][0]),
        capacity_chunks,
        int(header["candidate_capacity"][0]),
        rows.shape[2],
    )
    made: State = {
        "blocks": np.zeros(capacity_chunks // BLOCK + 1, np.int32),
        "offsets": np.zeros(capacity_chunks + 1, np.uint8),
        "links": (links & 0xFFFF).astype(np.uint16),
        "links_high": (links >> 16).astype(np.uint8) if high else np.zeros((1, 1), np.uint8),
        **{name: np.zeros((len(header), n), dtype) for name, (dtype, n) in scratch.items()},
    }
    _write_starts(made["blocks"], made["offsets"], starts)
    return {**arrays, **made}


def grow_index(arrays: State, capacity_tokens: int, min_chunk_tokens: int) -> State:
    """The same index with room for the chunks of `capacity_tokens` tokens."""
    grown = {name: arrays[name].copy() for name in FIXED}
    num_chunks, indexed_end, _, num_clusters, capacity, *_ = arrays["header"][0].tolist()
    capacity = max(capacity, num_chunks + room_for(indexed_end, capacity_tokens, min_chunk_tokens))
    links = np.zeros((len(grown["header"]), num_clusters + capacity), np.int32)
    links[:, : num_clusters + num_chunks] = links_of(arrays)
    return _with_room(grown, starts_of(arrays), links, capacity)


def starts_of(arrays: State) -> npt.NDArray[np.int64]:
    """First token of each chunk, then the end: int64 [num_chunks + 1]."""
    chunks = range(arrays["header"]["num_chunks"][0] + 1)
    return np.array([chunk_start(arrays["blocks"], arrays["offsets"], i) for i in chunks], np.int64)


def links_of(arrays: State) -> npt.NDArray[np.int32]:
    """Links of all clusters and present chunks: int32 [heads, num_clusters + num_chunks]."""
    header = arrays["header"][0]
    used = header["num_clusters"] + header["num_chunks"]
    links = arrays["links"][:, :used].astype(np.int32)
    if header["has_high_links"]:
        links += arrays["links_high"][:, :used].astype(np.int32) << 16
    return links
