"""Chunks of LycheeCluster's index whose keys were written anew.

They end where they did: the text is the same. A chunk that is ranked by itself gets its box anew;
of the paper's clusters those that it is below stay where they are and cover its new key, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.policies.lychee_cluster.chunks import BLOCK_SHIFT, chunk_start
from offload.policies.lychee_cluster.graft import forget_graft, mean_key, write_box
from offload.policies.lychee_cluster.views import bfloat16_bits_up, from_bfloat16, link_of
from offload.selection.compiled import cached_njit
from offload.selection.layer_state import State
from offload.selection.revised import Revised


@cached_njit()
def _groups_of(
    links: Any, high: Any, num_groups: int, capacity_groups: int, first: int, n: int
) -> Any:
    """int64 [n], the group of each chunk from `first` on."""
    groups = np.zeros(n, np.int64)
    for group in range(num_groups):
        link = link_of(links, high, group)
        while link > first:  # newest first
            groups[link - 1 - first] = group
            link = link_of(links, high, capacity_groups + link - 1)
    return groups


@cached_njit()
def _cover(row: Any, scale: Any, point: Any) -> None:
    """Let the radius of a centroid reach a point."""
    step, distance = from_bfloat16(scale[0]), 0.0
    for d in range(len(row)):
        off = point[d] - np.float32(row[d]) * step
        distance += off * off
    needed = np.sqrt(distance)
    if needed > from_bfloat16(scale[1]):
        scale[1] = bfloat16_bits_up(np.float32(needed * (1 + 1e-5) + 1e-6))  # as padded_radius


@cached_njit(nogil=True)
def _rank(keys: Any, starts: Any, first: int, index: Any, sizes: Any) -> None:
    """Rank the chunks from `first` on by the keys of the tokens starts[0] .. starts[-1] that they
    are of.

    Args:
        keys: [num_kv_heads, n * head_dim].
        index: `rows`, `scales`, `ranges`, `links` and `links_high` of the arrays.
        sizes: units, groups, groups that there is room for, whether links have a high part, paper.
    """
    all_rows, all_scales, ranges, links, links_high = index
    num_units, num_groups, capacity_groups, has_high_links, paper = sizes
    width, no_links = all_rows.shape[2], np.zeros(0, np.uint8)
    mean = np.empty(width, np.float32)
    for h in range(len(keys)):
        rows, scales = all_rows[h], all_scales[h]
        high = links_high[h] if has_high_links else no_links
        num_chunks = len(starts) - 1
        groups = _groups_of(links[h], high, num_groups, capacity_groups, first, num_chunks)
        units = np.searchsorted(ranges[h, 1 : num_units + 1], groups, side="right")
        for i in range(num_chunks):
            length = starts[i + 1] - starts[i]
            flat = keys[h, (starts[i] - starts[0]) * width :]
            norm = mean_key(flat, length, mean)
            row = num_units + groups[i]
            if not paper:
                write_box(flat, length, mean, rows[row], scales[:, row])
                continue
            if norm > 0:
                mean *= np.float32(1 / norm)
            _cover(rows[row], scales[:, row], mean)
            _cover(rows[units[i]], scales[:, units[i]], mean)


def compile_rank() -> None:
    """Have it ready for arrays as they are: here it ranks nothing."""
    rows, scales = np.zeros((1, 1, 8), np.int8), np.zeros((1, 2, 1), np.uint16)
    ranges, links = np.zeros((1, 2), np.int32), np.zeros((1, 1), np.uint16)
    index = (rows, scales, ranges, links, np.zeros((1, 1), np.uint8))
    _rank(np.zeros((1, 0), np.float32), np.zeros(1, np.int64), 0, index, (0, 0, 0, 0, 0))


def revise_chunks(arrays: State, revised: Revised) -> None:
    """Rank the chunks that end after `revised.first` by the keys that they have now."""
    forget_graft(arrays)
    header, blocks, offsets = arrays["header"][0], arrays["blocks"], arrays["offsets"]
    chunk = num_chunks = int(header["num_chunks"])
    while chunk > 0 and chunk_start(blocks, offsets, chunk) > revised.first:
        chunk -= 1
    if chunk == num_chunks:
        return
    ends = np.arange(chunk, num_chunks + 1)
    starts = blocks[ends >> BLOCK_SHIFT] + offsets[ends].astype(np.int64)
    keys = revised.load_keys(int(starts[0])).float().flatten(1).numpy()
    index = tuple(arrays[name] for name in ("rows", "scales", "ranges", "links", "links_high"))
    sizes = ("num_units", "num_groups", "capacity_groups", "has_high_links", "paper")
    _rank(keys, starts, chunk, index, tuple(int(header[name]) for name in sizes))
