"""LycheeCluster's index of one layer: coarse units -> fine clusters -> chunks, for every KV head.

Centroids are int8 rows with a bfloat16 scale, each with a bfloat16 covering radius, rounded up.
Radii are measured from the *dequantised* centroid, so that for every chunk key v (the unit-length
mean of a chunk's keys) below a centroid mu and every query q

    q·v <= q·mu + |q| radius                                   (arXiv 2603.08453, eq. 2)

holds for the numbers stored. Arrays, as callbacks find them in `ctx.arrays`:

    HEADER   int64 [num_kv_heads, HEADER_COLUMNS]: sizes
    ROWS     int8 [num_kv_heads, num_units + num_clusters, head_dim]: units first, then the
             clusters, those of a unit one after the other
    SCALES   uint16 [num_kv_heads, 3, num_units + num_clusters]: bits of scales, of radii, and in
             two bytes the mean norm of the chunks' mean keys before they were scaled to unit
             length (low) and their largest spread (high), in steps of the KV head; one kind after
             the other, so that ranking runs over vectors
    RANGES   int32 [num_kv_heads, 2 num_units + 1]: first cluster of each unit, then the end; and
             the number of chunks below each unit
    STARTS   uint8: where the layer's chunks start, shared by its heads (lychee_chunks)
    LINKS    uint16 [num_kv_heads, num_clusters + capacity_chunks]: each cluster's newest chunk,
             then each chunk's next older one in its cluster; chunk + 1, 0 ends the list
    LINKS_HIGH  uint8, the same shape: bits 16 to 23, only where the capacity needs them
    SCRATCH  uint8 [num_kv_heads, …]: room for the callbacks to work in; not part of the index
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from cpu_ops.clustering import chunk_means, spherical_kmeans
from offload.policies.base import BuildContext
from offload.policies.lychee_cluster.chunks import (
    BLOCK,
    MAX_CHUNK_TOKENS,
    chunk_start,
    set_chunk_start,
)

HEADER, ROWS, SCALES, RANGES, STARTS, LINKS, LINKS_HIGH, SCRATCH = range(8)
# The columns of HEADER.
NUM_CHUNKS = 0
INDEXED_END = 1  # tokens from here on are in no chunk yet
NUM_UNITS = 2
NUM_CLUSTERS = 3
CAPACITY_CHUNKS = 4
HAS_HIGH_LINKS = 5
CANDIDATE_CAPACITY = 6
SCRATCH_BYTES = 7  # of one KV head
NORM_STEP = 8  # bits of a float32: what a norm byte counts
SPREAD_STEP = 9
HEADER_COLUMNS = 10
# Of the last graft: the kv_len of its step, or 0; its unit and cluster; and what was there before:
# the header, the cluster's first link, three kinds of scales of the unit and of the cluster.
GRAFTED_AT, GRAFTED_UNIT, GRAFTED_CLUSTER = 0, 1, 2
OLD_HEADER, OLD_LINK, OLD_SCALES = 3, 3 + HEADER_COLUMNS, 4 + HEADER_COLUMNS
LAST_GRAFT_COLUMNS = OLD_SCALES + 6
Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
_LOW_LINKS = 1 << 16


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


def starts_bytes(capacity_chunks: int) -> int:
    """Size of STARTS: block starts, then one offset for each chunk and for the end."""
    return 4 * (capacity_chunks // BLOCK + 1) + capacity_chunks + 1


def split_starts(starts: Array, capacity_chunks: int) -> tuple[Array, Array]:
    """The block starts (int32) and the offsets (uint8) in STARTS."""
    split = 4 * (capacity_chunks // BLOCK + 1)
    return starts[:split].view(np.int32), starts[split:]


def scratch_bytes(
    num_clusters: int, capacity_chunks: int, candidate_capacity: int, head_dim: int
) -> int:
    """Of one KV head; `lychee_views.scratch_of` cuts it up."""
    flags = (capacity_chunks // 64 + 1) * 8
    floats = head_dim * (MAX_CHUNK_TOKENS + 3) + max(num_clusters, 64)
    candidates = candidate_capacity + MAX_CHUNK_TOKENS  # chunks are written whole
    work = (flags + 4 * (floats + candidates + num_clusters + 256) + 63) // 64 * 64
    return work + graft_bytes(head_dim)


def graft_bytes(head_dim: int) -> int:
    """At the end of a KV head's scratch: what the last graft changed, as it was before.

    int64 [LAST_GRAFT_COLUMNS], then the rows of the unit and the cluster.
    """
    return (8 * LAST_GRAFT_COLUMNS + 2 * head_dim + 63) // 64 * 64


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

    @classmethod
    def of(
        cls,
        starts: npt.NDArray[np.int64],
        *,
        chunks_per_cluster: int,
        max_units: int,
        min_chunk_tokens: int,
        capacity_tokens: int,
        candidate_capacity: int,
    ) -> IndexShape:
        num_chunks = len(starts) - 1
        num_clusters = max(1, num_chunks // chunks_per_cluster)
        return cls(
            starts=starts,
            num_clusters=num_clusters,
            num_units=min(max_units, max(1, round(num_clusters**0.5))),
            capacity_chunks=num_chunks + _room(int(starts[-1]), capacity_tokens, min_chunk_tokens),
            candidate_capacity=candidate_capacity,
        )

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


def index_arrays(clusters: Clusters, shape: IndexShape) -> list[Array]:
    """The arrays of a layer's index."""
    labels, units, rows = clusters.labels, clusters.units, clusters.rows
    heads, num_units = len(rows), shape.num_units
    of_unit = np.take_along_axis(units, labels, axis=1)
    ranges = np.zeros((heads, 2 * num_units + 1), np.int32)
    for h in range(heads):
        ranges[h, : num_units + 1] = np.searchsorted(units[h], np.arange(num_units + 1))
        ranges[h, num_units + 1 :] = np.bincount(of_unit[h], minlength=num_units)

    header = np.zeros((heads, HEADER_COLUMNS), np.int64)
    mean_norms, max_spreads = _norms_and_spreads(
        clusters.norms, clusters.spreads, labels, of_unit, rows.shape[:2]
    )
    # Half as much again as the largest there is, for what is to come.
    norm_steps, spread_steps = (
        1.5 / 255 * x.max(axis=1, initial=0).astype(np.float32)
        for x in (clusters.norms, clusters.spreads)
    )
    header[:, NORM_STEP] = norm_steps.view(np.int32)
    header[:, SPREAD_STEP] = spread_steps.view(np.int32)
    codes = encode_bytes(mean_norms, norm_steps) | encode_bytes(max_spreads, spread_steps) << 8
    header[:, NUM_CHUNKS] = shape.num_chunks
    header[:, INDEXED_END] = shape.starts[-1]
    header[:, NUM_UNITS] = num_units
    header[:, NUM_CLUSTERS] = shape.num_clusters
    header[:, CANDIDATE_CAPACITY] = shape.candidate_capacity
    links = np.zeros((heads, shape.num_clusters + shape.capacity_chunks), np.int32)
    _link(labels, shape.num_clusters, links)
    packed = np.zeros(starts_bytes(shape.capacity_chunks), np.uint8)
    _write_starts(*split_starts(packed, shape.capacity_chunks), shape.starts)
    arrays: list[Array] = [
        header,
        rows,
        np.stack([clusters.scales, padded_radius(clusters.radii), codes], axis=1),
        ranges,
        packed,
        links,
        links,
        links,
    ]
    return _with_links(arrays, links, shape.capacity_chunks)


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


def _room(indexed_end: int, capacity_tokens: int, min_chunk_tokens: int) -> int:
    """Chunks that tokens up to the capacity may still make."""
    return max(0, capacity_tokens - indexed_end) // min_chunk_tokens + 1


def _with_links(
    arrays: list[Array], links: npt.NDArray[np.int32], capacity_chunks: int
) -> list[Array]:
    """`arrays` with these links and what depends on their number."""
    header, rows = arrays[HEADER], arrays[ROWS]
    num_clusters = int(header[0, NUM_CLUSTERS])
    high = capacity_chunks + 1 >= _LOW_LINKS
    size = scratch_bytes(
        num_clusters, capacity_chunks, int(header[0, CANDIDATE_CAPACITY]), rows.shape[2]
    )
    header[:, CAPACITY_CHUNKS] = capacity_chunks
    header[:, HAS_HIGH_LINKS] = high
    header[:, SCRATCH_BYTES] = size
    arrays[LINKS] = (links & 0xFFFF).astype(np.uint16)
    arrays[LINKS_HIGH] = (links >> 16).astype(np.uint8) if high else np.zeros((1, 1), np.uint8)
    arrays[SCRATCH] = np.zeros((len(header), size), np.uint8)
    return arrays


def grow_index(arrays: Sequence[Array], capacity_tokens: int, min_chunk_tokens: int) -> list[Array]:
    """The same index with room for the chunks of `capacity_tokens` tokens."""
    index = LycheeIndex(arrays)
    grown = [array.copy() for array in arrays]
    header = grown[HEADER]
    num_chunks = int(header[0, NUM_CHUNKS])
    room = _room(int(header[0, INDEXED_END]), capacity_tokens, min_chunk_tokens)
    capacity = max(index.capacity_chunks, num_chunks + room)
    grown[STARTS] = np.zeros(starts_bytes(capacity), np.uint8)
    _write_starts(*split_starts(grown[STARTS], capacity), index.starts())
    links = np.zeros((len(header), index.num_clusters + capacity), np.int32)
    links[:, : index.num_clusters + num_chunks] = index.links()
    return _with_links(grown, links, capacity)


@dataclass(frozen=True)
class LycheeIndex:
    """A view of the arrays, for tests, statistics and growing; callbacks use the arrays."""

    arrays: Sequence[Array]

    def _first(self, column: int) -> int:
        return int(self.arrays[HEADER][0, column])

    @property
    def num_chunks(self) -> int:
        return self._first(NUM_CHUNKS)

    @property
    def num_clusters(self) -> int:
        return self._first(NUM_CLUSTERS)

    @property
    def num_units(self) -> int:
        return self._first(NUM_UNITS)

    @property
    def capacity_chunks(self) -> int:
        return self._first(CAPACITY_CHUNKS)

    @property
    def indexed_end(self) -> int:
        """Tokens from here on are in no chunk yet."""
        return self._first(INDEXED_END)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index proper: without room for chunks to come, and without scratch."""
        heads = len(self.arrays[HEADER])
        per_link = 3 if self._first(HAS_HIGH_LINKS) else 2
        links = heads * (self.num_clusters + self.num_chunks) * per_link
        fixed = sum(self.arrays[i].nbytes for i in (HEADER, ROWS, SCALES, RANGES))
        return fixed + links + starts_bytes(self.num_chunks)

    def starts(self) -> npt.NDArray[np.int64]:
        """First token of each chunk, then the end: int64 [num_chunks + 1]."""
        blocks, offsets = split_starts(self.arrays[STARTS], self.capacity_chunks)
        chunks = range(self.num_chunks + 1)
        return np.array([chunk_start(blocks, offsets, i) for i in chunks], np.int64)

    def links(self) -> npt.NDArray[np.int32]:
        """Links of all clusters and present chunks: int32 [heads, num_clusters + num_chunks]."""
        used = self.num_clusters + self.num_chunks
        links = self.arrays[LINKS][:, :used].astype(np.int32)
        if self._first(HAS_HIGH_LINKS):
            links += self.arrays[LINKS_HIGH][:, :used].astype(np.int32) << 16
        return links

    def members(self, head: int) -> list[list[int]]:
        """Chunks of each cluster of a KV head, the newest first."""
        links = self.links()[head]
        result = []
        for cluster in range(self.num_clusters):
            chunks = []
            link = int(links[cluster])
            while link:
                chunks.append(link - 1)
                link = int(links[self.num_clusters + link - 1])
            result.append(chunks)
        return result

    def centroids(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Dequantised centroids [heads, num_units + num_clusters, head_dim] and their radii."""
        scales, radii = (
            bfloat16_value(self.arrays[SCALES][:, i]).astype(np.float64) for i in (0, 1)
        )
        return self.arrays[ROWS] * scales[..., None], radii

    def norms_and_spreads(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Mean norm and largest spread of the chunks below each row of `centroids`."""
        codes = self.arrays[SCALES][:, 2].astype(np.int64)
        norm_steps, spread_steps = (
            self.arrays[HEADER][:, column].astype(np.int32).view(np.float32).astype(np.float64)
            for column in (NORM_STEP, SPREAD_STEP)
        )
        return (codes & 0xFF) * norm_steps[:, None], (codes >> 8) * spread_steps[:, None]

    def unit_of_cluster(self, head: int) -> npt.NDArray[np.int64]:
        """Coarse unit of each cluster of a KV head."""
        first = self.arrays[RANGES][head, : self.num_units + 1]
        return np.repeat(np.arange(self.num_units), np.diff(first))
