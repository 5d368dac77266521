"""LycheeCluster's index of one layer: coarse units -> chunks, for every KV head.

Coarse units are clusters of chunks, found by the directions of their mean keys. Both are ranked by
the boxes that their keys fill (`pack_boxes`): a unit's centroid alone does not tell of the one
chunk in it that a query looks for. Rows are int8 with bfloat16 scales. The arrays: `layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from offload.selection.device_build import WORKSPACE_BYTES
from offload.selection.layer_state import BuildContext, State
from offload.system import huge_pages

_LOW_CHUNKS = 1 << 16  # that 16 bits number
UNIT_WIDTHS = 2 / 3  # of a unit's box, what of its half-widths counts
FIXED = ("header", "ranges", "carried")  # whatever the capacity


def bfloat16_up(x: Tensor) -> Tensor:
    """Bits, int32, of the smallest bfloat16 >= x, for x >= 0."""
    return (x.contiguous().view(torch.int32) + 0xFFFF) >> 16


def bfloat16_of(bits: Tensor) -> Tensor:
    """float32 of bfloat16 bits in int32."""
    return (bits << 16).view(torch.float32)


def quantize_rows(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
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


@dataclass(frozen=True)
class Groups:
    """What is ranked in a layer: units, and chunks by unit. Tensors of one device.

    Attributes:
        rows: int8 [heads, num_units + num_chunks, head_dim].
        scales: int16 [heads, 2, num_units + num_chunks], bits as `layout` has them.
        order: int32 [heads, num_chunks], the chunk at each place.
        units: int32 [heads, num_chunks], ascending: the unit of each place.
    """

    rows: Tensor
    scales: Tensor
    order: Tensor
    units: Tensor


@dataclass(frozen=True)
class IndexShape:
    """How many chunks and units a layer's index has, and what it leaves room for."""

    starts: npt.NDArray[np.int64]  # first token of each chunk, then the end
    num_units: int
    capacity_chunks: int
    candidate_capacity: int
    carried_tokens: int

    @property
    def num_chunks(self) -> int:
        return len(self.starts) - 1


def group_chunks(context: BuildContext, shape: IndexShape, iterations: int) -> Groups:
    """Put the chunks of a layer's keys into units, on the CPU."""
    if not shape.num_chunks:
        return no_groups(context.keys.shape[0], context.keys.shape[2], shape)
    points, centres, widths = chunk_boxes(context.pool, context.keys, shape.starts)
    units, _ = spherical_kmeans(context.pool, points, shape.num_units, iterations)
    boxes = torch.from_numpy(centres), torch.from_numpy(widths)
    return chunks_of_units(*boxes, torch.from_numpy(units), shape.num_units)


def chunks_of_units(centres: Tensor, widths: Tensor, units: Tensor, num_units: int) -> Groups:
    """Chunks and units of these chunks' boxes.

    Args:
        centres, widths: of `chunk_boxes`.
        units: [heads, num_chunks], the unit of each chunk.
    """
    order = torch.argsort(units, dim=1, stable=True)
    units = units.gather(1, order).long()
    in_order = order[..., None].expand_as(centres)
    centres, widths = centres.gather(1, in_order), widths.gather(1, in_order)
    coarse = _unit_boxes(centres, widths, units, num_units)
    centres, widths = (torch.cat(x, dim=1) for x in zip(coarse, (centres, widths), strict=True))
    rows, scales = pack_boxes(centres, widths)
    return Groups(rows, scales.to(torch.int16), order.int(), units.int())


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


def no_groups(num_heads: int, head_dim: int, shape: IndexShape) -> Groups:
    """One unit without chunks."""
    return Groups(
        rows=torch.zeros(num_heads, shape.num_units, head_dim, dtype=torch.int8),
        scales=torch.zeros(num_heads, 2, shape.num_units, dtype=torch.int16),
        order=torch.zeros(num_heads, 0, dtype=torch.int32),
        units=torch.zeros(num_heads, 0, dtype=torch.int32),
    )


def index_arrays(groups: Groups, shape: IndexShape) -> State:
    """The arrays of a layer's index, of groups on the CPU."""
    units, rows = groups.units.numpy(), groups.rows.numpy()
    heads, num_units = len(rows), shape.num_units
    ranges = np.zeros((heads, num_units + 1), np.int32)
    for h in range(heads):
        ranges[h] = np.searchsorted(units[h], np.arange(num_units + 1))

    header = np.zeros(heads, HEADER)
    header["num_chunks"] = shape.num_chunks
    header["indexed_end"] = shape.starts[-1]
    header["num_units"] = num_units
    header["candidate_capacity"] = shape.candidate_capacity
    header["carried_tokens"] = shape.carried_tokens
    scales = groups.scales.numpy().view(np.uint16)
    carried = np.zeros((heads, 2, 2 + shape.carried_tokens), np.int32)
    arrays: State = {"header": header, "ranges": ranges, "carried": carried}
    arrays |= {"rows": rows, "scales": scales}
    return _with_room(arrays, shape.starts, groups.order.numpy(), shape.capacity_chunks)


def room_for(indexed_end: int, capacity_tokens: int, min_chunk_tokens: int) -> int:
    """Chunks that tokens up to the capacity may still make."""
    return max(0, capacity_tokens - indexed_end) // min_chunk_tokens + 1


def _with_room(
    arrays: State,
    starts: npt.NDArray[np.int64],
    order: npt.NDArray[np.int32],
    capacity_chunks: int,
) -> State:
    """`arrays` with these chunks, and with everything whose size depends on their capacity.

    Args:
        arrays: FIXED, and the rows and scales that there are.
        order: int32 [heads, num_chunks].
    """
    header, heads = arrays["header"], len(arrays["header"])
    num_units = int(header["num_units"][0])
    present = num_units + order.shape[1]
    head_dim = arrays["rows"].shape[2]
    high = capacity_chunks > _LOW_CHUNKS
    header["capacity_chunks"], header["has_high_order"] = capacity_chunks, high
    scratch = scratch_rows(capacity_chunks, int(header["candidate_capacity"][0]), head_dim)
    with_room = np.zeros((heads, capacity_chunks), np.int32)
    with_room[:, : order.shape[1]] = order
    made: State = {
        # A search reads a little here and there of them: with small pages it waits for their table.
        "rows": huge_pages.zeros((heads, num_units + capacity_chunks, head_dim), np.int8),
        "scales": np.zeros((heads, 2, num_units + capacity_chunks), np.uint16),
        "blocks": np.zeros(capacity_chunks // BLOCK + 1, np.int32),
        "offsets": np.zeros(capacity_chunks + 1, np.uint8),
        "order": (with_room & 0xFFFF).astype(np.uint16),
        "order_high": ((with_room >> 16).astype(np.uint8) if high else np.zeros((1, 1), np.uint8)),
        **{name: np.zeros((heads, n), dtype) for name, (dtype, n) in scratch.items()},
    }
    made["rows"][:, :present] = arrays["rows"]
    made["scales"][..., :present] = arrays["scales"]
    of_blocks = starts[::BLOCK]
    made["blocks"][: len(of_blocks)] = of_blocks
    made["offsets"][: len(starts)] = starts - of_blocks.repeat(BLOCK)[: len(starts)]
    return {**arrays, **made}


def grow_index(arrays: State, capacity_tokens: int, min_chunk_tokens: int) -> State:
    """The same index with room for the chunks of `capacity_tokens` tokens."""
    grown = {name: arrays[name].copy() for name in FIXED}
    header = arrays["header"][0]
    num_chunks, capacity = int(header["num_chunks"]), int(header["capacity_chunks"])
    num_rows = int(header["num_units"]) + num_chunks
    room = room_for(int(header["indexed_end"]), capacity_tokens, min_chunk_tokens)
    grown["rows"], grown["scales"] = arrays["rows"][:, :num_rows], arrays["scales"][..., :num_rows]
    return _with_room(grown, starts_of(arrays), order_of(arrays), max(capacity, num_chunks + room))


def starts_of(arrays: State) -> npt.NDArray[np.int64]:
    """First token of each chunk, then the end: int64 [num_chunks + 1]."""
    offsets = arrays["offsets"][: arrays["header"]["num_chunks"][0] + 1]
    starts: npt.NDArray[np.int64] = arrays["blocks"].repeat(BLOCK)[: len(offsets)] + np.int64(
        offsets
    )
    return starts


def order_of(arrays: State) -> npt.NDArray[np.int32]:
    """The chunk at each place: int32 [heads, num_chunks]."""
    header = arrays["header"][0]
    order = arrays["order"].astype(np.int32)
    if header["has_high_order"]:
        order += arrays["order_high"].astype(np.int32) << 16
    return order[:, : header["num_chunks"]]
