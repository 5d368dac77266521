"""Chunks that were grafted get their coarse units: what a search ranks stays as it was built for.

A grafted chunk is ranked by every search until the arrays grow. There it goes to the unit whose
direction is nearest to its own, and the unit's box becomes that of its chunks, old and new, as the
index has them. Where an index without units has come to half more chunks than a search ranks, or
one with units to many more than it had, its units are found as a build finds them. Both are done
between steps, in arrays of their own: a step that fails has those of before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cpu_ops.clustering import spherical_kmeans
from cpu_ops.worker_pool import WorkerPool
from offload.policies.lychee_cluster.graft import forget_graft, pack_box
from offload.policies.lychee_cluster.index import UNIT_WIDTHS
from offload.policies.lychee_cluster.views import from_bfloat16
from offload.selection.compiled import cached_njit
from offload.selection.layer_state import State

_ITERATIONS = 4  # at most, where all of a layer waits; ten find little more


@cached_njit()
def _sort_by_unit(units: Any, ranges: Any, order: Any) -> None:
    """Places by unit, each unit's as they were; `ranges` as `layout` has them."""
    ranges[:] = 0
    for unit in units:
        ranges[unit + 1] += 1
    for unit in range(len(ranges) - 1):
        ranges[unit + 1] += ranges[unit]
    next_of = ranges[:-1].copy()
    for place in range(len(units)):
        order[next_of[units[place]]] = place
        next_of[units[place]] += 1


@cached_njit()
def _write_unit_boxes(ranges: Any, rows: Any, scales: Any, unit_widths: Any) -> None:
    """The first rows: as `index._unit_boxes`, of the boxes in the rows behind them."""
    num_units, width = len(ranges) - 1, rows.shape[1]
    total = np.empty(width, np.float32)
    low, high = np.empty(width, np.float32), np.empty(width, np.float32)
    for unit in range(num_units):
        total[:], low[:], high[:] = 0, np.inf, -np.inf
        for row in range(num_units + ranges[unit], num_units + ranges[unit + 1]):
            step, width_step = from_bfloat16(scales[0, row]), from_bfloat16(scales[1, row])
            for d in range(width):
                packed = np.int32(rows[row, d])
                centre = np.float32(((packed & 15) ^ 8) - 8) * step
                half = np.float32((packed >> 4) & 15) * width_step
                total[d] += centre
                low[d], high[d] = min(low[d], centre - half), max(high[d], centre + half)
        count = np.float32(max(1, ranges[unit + 1] - ranges[unit]))
        for d in range(width):
            middle, half = (
                np.float32(0.5) * (low[d] + high[d]),
                np.float32(0.5) * (high[d] - low[d]),
            )
            total[d] = np.float32(0.5) * (total[d] / count + middle)
            high[d] = unit_widths * half
        pack_box(total, high, rows[unit], scales[:, unit])


def _directions(rows: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Directions of the boxes' centres, of unit length: float32 [heads, n, head_dim]."""
    centres = ((rows & 15 ^ 8) - 8).astype(np.float32)
    norms = np.linalg.norm(centres, axis=-1, keepdims=True)
    directions: npt.NDArray[np.float32] = centres / np.maximum(norms, 1)
    return directions


def _units_of(arrays: State, num_units: int, pool: WorkerPool) -> npt.NDArray[np.int64]:
    """int64 [heads, num_chunks], the unit of each place."""
    header, rows, ranges = arrays["header"][0], arrays["rows"], arrays["ranges"]
    first, end = int(header["num_units"]), int(header["num_units"] + header["num_chunks"])
    if num_units != first:
        points = np.ascontiguousarray(_directions(rows[:, first:end]))
        found, _ = spherical_kmeans(pool, points, num_units, _ITERATIONS)
        return found.astype(np.int64)
    units = np.empty((len(rows), end - first), np.int64)
    for h, of_head in enumerate(rows):
        built = int(ranges[h, num_units])
        units[h, :built] = np.repeat(np.arange(num_units), np.diff(ranges[h, : num_units + 1]))
        nearest = _directions(of_head[first + built : end]) @ _directions(of_head[:first]).T
        units[h, built:] = nearest.argmax(axis=1)
    return units


def place_grafts(arrays: State, num_units: int, pool: WorkerPool) -> State:
    """The arrays, or copies of some in which every chunk is in a unit.

    Args:
        num_units: that there should be; all are found anew where there are less than half of them.
    """
    header = arrays["header"].copy()
    num_chunks, before = int(header["num_chunks"][0]), int(header["num_units"][0])
    num_units = num_units if num_units > 2 * before else before
    if num_units == 1 or num_chunks == arrays["ranges"][0, before]:
        return arrays
    units = _units_of(arrays, num_units, pool)
    shape = (len(header), num_units + num_chunks)
    placed: State = {
        "header": header,
        "rows": np.empty((*shape, arrays["rows"].shape[2]), np.int8),
        "scales": np.empty((shape[0], 2, shape[1]), np.uint16),
        "ranges": np.empty((shape[0], num_units + 1), np.int32),
        "order": arrays["order"].copy(),
        "order_high": arrays["order_high"].copy(),
        "last_graft": arrays["last_graft"].copy(),
    }
    header["num_units"] = num_units
    order = np.empty(num_chunks, np.int64)
    for h in range(len(header)):
        _sort_by_unit(units[h], placed["ranges"][h], order)
        rows, scales = placed["rows"][h], placed["scales"][h]
        rows[num_units:] = arrays["rows"][h, before + order]
        scales[:, num_units:] = arrays["scales"][h][:, before + order]
        _write_unit_boxes(placed["ranges"][h], rows, scales, np.float32(UNIT_WIDTHS))
        for name in ("order", "order_high") if header["has_high_order"][h] else ("order",):
            placed[name][h, :num_chunks] = arrays[name][h, order]
    forget_graft(placed)
    return {**arrays, **placed}
