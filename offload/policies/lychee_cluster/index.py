"""LycheeCluster's index of one layer: coarse units -> groups -> chunks, for every KV head.

Coarse units are clusters of chunks, found by the directions of their mean keys. Both are ranked by
the boxes that their keys fill (`pack_boxes`): a unit's centroid alone does not tell of the one
chunk in it that a query looks for.

In the paper's index there are clusters of chunks below the units. Centroids have covering radii
there, measured from the *dequantised* centroid and rounded up, so that for every chunk key v (the
unit-length mean of a chunk's keys) below a centroid mu and every query q

    q·v <= q·mu + |q| radius                                   (arXiv 2603.08453, eq. 2)

holds for the numbers stored. Rows are int8 with a bfloat16 scale. The arrays: `layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.clustering import chunk_boxes, spherical_kmeans
from offload.policies.lychee_cluster.chunks import BLOCK
from offload.policies.lychee_cluster.layout import (
    CENTRE_STEPS,
    HEADER,
    WIDTH_STEPS,
    scratch_rows,
)
from offload.selection.compiled import cached_njit
from offload.selection.device_build import WORKSPACE_BYTES
from offload.selection.layer_state import BuildContext, State
from offload.system import huge_pages

_LOW_LINKS = 1 << 16
UNIT_WIDTHS = 2 / 3  # of a unit's box, what of its half-widths counts
FIXED = ("header", "ranges", "carried")  # whatever the capacity


def bfloat16_up(x: Tensor) -> Tensor:
    """Bits, int32, of the smallest bfloat16 >= x, for x >= 0."""
    return (x.contiguous().view(torch.int32) + 0xFFFF) >> 16


def bfloat16_of(bits: Tensor) -> Tensor:
    """float32 of bfloat16 bits in int32."""
    return (bits << 16).view(torch.float32)


def quantize_rows(x: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """int8 rows up to `most` and the bits, int32, of their bfloat16 scales: x ~ rows * scale."""
    scales = bfloat16_up(x.abs().amax(-1) / most)
    steps = bfloat16_of(scales)[..., None]
    rows = torch.where(steps > 0, x / steps, 0.0).round()
    return rows.to(torch.int8), scales


def pack_boxes(centres: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of boxes as `layout` has them, and the bits of the scales of both, int32 [heads, 2, n].

    Four bits are enough of both: what eight find more is less than between two prompts.

    Args:
        centres, widths: float32 [heads, n, head_dim].
    """
    low, scales = quantize_rows(centres, CENTRE_STEPS)
    high, of_widths = quantize_rows(widths, WIDTH_STEPS)
    return low & 15 | high << 4, torch.stack([scales, of_widths], dim=1)


def padded_radius(radius: Tensor) -> Tensor:
    """bfloat16 bits of a radius that holds in spite of float32 rounding."""
    return bfloat16_up(radius * (1 + 1e-5) + 1e-6)


@cached_njit()
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


@cached_njit()
def _link(labels: Any, num_clusters: int, links: Any) -> None:
    for h in range(labels.shape[0]):
        for i in range(labels.shape[1]):
            c = labels[h, i]
            links[h, num_clusters + i] = links[h, c]
            links[h, c] = i + 1


@dataclass(frozen=True)
class Groups:
    """What is ranked in a layer: units, and below them groups of chunks. Tensors of one device.

    Attributes:
        rows: int8 [heads, num_units + num_groups, head_dim].
        scales: int16 [heads, 2, num_units + num_groups], bits as `layout` has them.
        labels: int32 [heads, num_chunks], the group of each chunk.
        units: int32 [heads, num_groups], ascending: the unit of each group.
    """

    rows: Tensor
    scales: Tensor
    labels: Tensor
    units: Tensor


@dataclass(frozen=True)
class IndexShape:
    """How many chunks, groups and units a layer's index has, and what it leaves room for."""

    starts: npt.NDArray[np.int64]  # first token of each chunk, then the end
    num_groups: int
    num_units: int
    capacity_chunks: int
    candidate_capacity: int
    carried_tokens: int
    paper: bool

    @property
    def num_chunks(self) -> int:
        return len(self.starts) - 1


def group_chunks(context: BuildContext, shape: IndexShape, iterations: int) -> Groups:
    """Group the chunks of a layer's keys on the CPU."""
    if not shape.num_chunks:
        return no_groups(context.keys.shape[0], context.keys.shape[2], shape)
    points, centres, widths = chunk_boxes(context.pool, context.keys, shape.starts)
    if not shape.paper:
        units, _ = spherical_kmeans(context.pool, points, shape.num_units, iterations)
        boxes = torch.from_numpy(centres), torch.from_numpy(widths)
        return chunks_of_units(*boxes, torch.from_numpy(units), shape.num_units)
    labels, fine = spherical_kmeans(context.pool, points, shape.num_groups, iterations)
    units, coarse = spherical_kmeans(context.pool, fine, shape.num_units, iterations)

    def cover(labels: Tensor, units: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        groups, coarser = labels.numpy(), units.gather(1, labels).numpy()
        given = rows.numpy(), steps.numpy()
        of_groups = _radii(points, groups + shape.num_units, *given)
        return torch.from_numpy(np.maximum(of_groups, _radii(points, coarser, *given)))

    clusters = (labels, fine, units, coarse)
    return clusters_of_units(cover, *map(torch.from_numpy, clusters))


def chunks_of_units(centres: Tensor, widths: Tensor, units: Tensor, num_units: int) -> Groups:
    """Every chunk a group.

    Args:
        centres, widths: of `chunk_boxes`.
        units: [heads, num_chunks], the unit of each chunk.
    """
    units, order, position = _by_unit(units)
    in_order = order[..., None].expand_as(centres)
    centres, widths = centres.gather(1, in_order), widths.gather(1, in_order)
    coarse = _unit_boxes(centres, widths, units, num_units)
    centres, widths = (torch.cat(x, dim=1) for x in zip(coarse, (centres, widths), strict=True))
    rows, scales = pack_boxes(centres, widths)
    return Groups(rows, scales.to(torch.int16), position.int(), units.int())


def _unit_boxes(
    centres: Tensor, widths: Tensor, units: Tensor, num_units: int
) -> tuple[Tensor, Tensor]:
    """Centres, as `chunk_boxes` has them, and half-widths of the boxes that units' chunks fill.

    These count less (`UNIT_WIDTHS`): of many chunks few are where a box ends. Sums are products of
    matrices, which come to the same in every run.
    """
    num_heads, num_chunks, head_dim = centres.shape
    means = centres.new_empty(num_heads, num_units, head_dim)
    numbers = torch.arange(num_units, device=units.device)[:, None]
    at_once = max(1, WORKSPACE_BYTES // (4 * num_units * num_chunks))
    for first in range(0, num_heads, at_once):
        heads = slice(first, first + at_once)
        members = (units[heads, None] == numbers).float()
        means[heads] = members @ centres[heads] / members.sum(-1, keepdim=True)
    of_chunk = units[..., None].expand_as(centres)
    low, high = (
        torch.empty_like(means).scatter_reduce_(1, of_chunk, ends, extreme, include_self=False)
        for ends, extreme in ((centres - widths, "amin"), (centres + widths, "amax"))
    )
    return means / 2 + (low + high) / 4, UNIT_WIDTHS * (high - low) / 2


def clusters_of_units(
    cover: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    fine: Tensor,
    units: Tensor,
    coarse: Tensor,
) -> Groups:
    """Clusters of chunks.

    Args:
        cover: radii of rows in order, of labels, units, rows and their scales.
        labels: [heads, num_chunks], the cluster of each chunk.
        fine: float32 [heads, num_clusters, head_dim].
        units: [heads, num_clusters], the unit of each cluster.
        coarse: float32 [heads, num_units, head_dim].
    """
    units, order, position = _by_unit(units)
    labels = position.gather(1, labels.long())
    fine = fine.gather(1, order[..., None].expand_as(fine))
    rows, scales = quantize_rows(torch.cat([coarse, fine], dim=1))
    radii = padded_radius(cover(labels, units, rows, bfloat16_of(scales)))
    scales = torch.stack([scales, radii], dim=1).to(torch.int16)
    return Groups(rows, scales, labels.int(), units.int())


def _by_unit(units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Units ascending, int64; where each was before; and where it is now."""
    units = units.long()
    order = torch.argsort(units, dim=1, stable=True)
    position = torch.empty_like(order)
    numbers = torch.arange(order.shape[1], device=order.device)
    position.scatter_(1, order, numbers.expand_as(order))
    return units.gather(1, order), order, position


def no_groups(num_heads: int, head_dim: int, shape: IndexShape) -> Groups:
    """One unit; in the paper's index below it a cluster, which the first chunk will fill."""
    rows = torch.zeros(num_heads, 1 + shape.num_groups, head_dim, dtype=torch.int8)
    return Groups(
        rows=rows,
        scales=torch.zeros(num_heads, 2, rows.shape[1], dtype=torch.int16),
        labels=torch.zeros(num_heads, 0, dtype=torch.int32),
        units=torch.zeros(num_heads, shape.num_groups, dtype=torch.int32),
    )


def index_arrays(groups: Groups, shape: IndexShape) -> State:
    """The arrays of a layer's index, of groups on the CPU."""
    labels, units, rows = (x.numpy() for x in (groups.labels, groups.units, groups.rows))
    heads, num_units = len(rows), shape.num_units
    of_unit = np.take_along_axis(units, labels, axis=1)
    ranges = np.zeros((heads, 2 * num_units + 1), np.int32)
    for h in range(heads):
        ranges[h, : num_units + 1] = np.searchsorted(units[h], np.arange(num_units + 1))
        ranges[h, num_units + 1 :] = np.bincount(of_unit[h], minlength=num_units)

    header = np.zeros(heads, HEADER)
    header["num_chunks"] = shape.num_chunks
    header["indexed_end"] = shape.starts[-1]
    header["num_units"] = num_units
    header["num_groups"] = shape.num_groups
    header["candidate_capacity"] = shape.candidate_capacity
    header["carried_tokens"] = shape.carried_tokens
    header["paper"] = shape.paper
    links = np.zeros((heads, shape.num_groups + shape.num_chunks), np.int32)
    _link(labels, shape.num_groups, links)
    scales = groups.scales.numpy().view(np.uint16)
    carried = np.zeros((heads, 2, 2 + shape.carried_tokens), np.int32)
    arrays: State = {"header": header, "ranges": ranges, "carried": carried}
    arrays |= {"rows": rows, "scales": scales}
    return _with_room(arrays, shape.starts, links, shape.capacity_chunks)


def room_for(indexed_end: int, capacity_tokens: int, min_chunk_tokens: int) -> int:
    """Chunks that tokens up to the capacity may still make."""
    return max(0, capacity_tokens - indexed_end) // min_chunk_tokens + 1


def _with_room(
    arrays: State,
    starts: npt.NDArray[np.int64],
    links: npt.NDArray[np.int32],
    capacity_chunks: int,
) -> State:
    """`arrays` with these chunks, and with everything whose size depends on their capacity.

    Args:
        arrays: FIXED, and what groups there are.
        links: int32 [heads, num_groups + num_chunks].
    """
    header, heads = arrays["header"], len(arrays["header"])
    num_groups, num_units = int(header["num_groups"][0]), int(header["num_units"][0])
    head_dim = arrays["rows"].shape[2]
    grows = not header["paper"][0]  # a grafted chunk is a group of its own
    groups = capacity_chunks if grows else num_groups
    high = capacity_chunks + 1 >= _LOW_LINKS
    header["capacity_groups"], header["capacity_chunks"] = groups, capacity_chunks
    header["has_high_links"] = high
    scratch = scratch_rows(groups, capacity_chunks, int(header["candidate_capacity"][0]), head_dim)
    with_room = np.zeros((heads, groups + capacity_chunks), np.int32)
    with_room[:, :num_groups] = links[:, :num_groups]
    with_room[:, groups : groups + links.shape[1] - num_groups] = links[:, num_groups:]
    made: State = {
        # A search reads a little here and there of them: with small pages it waits for their table.
        "rows": huge_pages.zeros((heads, num_units + groups, head_dim), np.int8),
        "scales": np.zeros((heads, 2, num_units + groups), np.uint16),
        "blocks": np.zeros(capacity_chunks // BLOCK + 1, np.int32),
        "offsets": np.zeros(capacity_chunks + 1, np.uint8),
        "links": (with_room & 0xFFFF).astype(np.uint16),
        "links_high": ((with_room >> 16).astype(np.uint8) if high else np.zeros((1, 1), np.uint8)),
        **{name: np.zeros((heads, n), dtype) for name, (dtype, n) in scratch.items()},
    }
    made["rows"][:, : num_units + num_groups] = arrays["rows"]
    made["scales"][..., : num_units + num_groups] = arrays["scales"]
    of_blocks = starts[::BLOCK]
    made["blocks"][: len(of_blocks)] = of_blocks
    made["offsets"][: len(starts)] = starts - of_blocks.repeat(BLOCK)[: len(starts)]
    return {**arrays, **made}


def grow_index(arrays: State, capacity_tokens: int, min_chunk_tokens: int) -> State:
    """The same index with room for the chunks of `capacity_tokens` tokens."""
    grown = {name: arrays[name].copy() for name in FIXED}
    header = arrays["header"][0]
    num_chunks, capacity = int(header["num_chunks"]), int(header["capacity_chunks"])
    num_rows = int(header["num_units"] + header["num_groups"])
    room = room_for(int(header["indexed_end"]), capacity_tokens, min_chunk_tokens)
    grown["rows"], grown["scales"] = arrays["rows"][:, :num_rows], arrays["scales"][..., :num_rows]
    return _with_room(grown, starts_of(arrays), links_of(arrays), max(capacity, num_chunks + room))


def starts_of(arrays: State) -> npt.NDArray[np.int64]:
    """First token of each chunk, then the end: int64 [num_chunks + 1]."""
    offsets = arrays["offsets"][: arrays["header"]["num_chunks"][0] + 1]
    starts: npt.NDArray[np.int64] = arrays["blocks"].repeat(BLOCK)[: len(offsets)] + np.int64(
        offsets
    )
    return starts


def links_of(arrays: State) -> npt.NDArray[np.int32]:
    """Links of all present groups and chunks: int32 [heads, num_groups + num_chunks]."""
    header = arrays["header"][0]
    links = arrays["links"].astype(np.int32)
    if header["has_high_links"]:
        links += arrays["links_high"].astype(np.int32) << 16
    first = header["capacity_groups"]
    of_groups, of_chunks = links[:, :first], links[:, first:]
    return np.concatenate(
        [of_groups[:, : header["num_groups"]], of_chunks[:, : header["num_chunks"]]], axis=1
    )
