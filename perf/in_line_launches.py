"""What kernels of retrieval heads that follow each other can do for each other, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpu_ops.split_kv import SplitLaunch
from gpu_ops.top_k_candidates import TopKLaunch


def in_line_launches(
    split: SplitLaunch, top_k: TopKLaunch
) -> Iterator[tuple[str, int, SplitLaunch, TopKLaunch]]:
    """(name, programs per multiprocessor, launches); those named + add to the one before."""
    split = replace(
        split, merges_early=False, starts_early=False, prefetches=False, keeps_scores=False
    )
    top_k = replace(top_k, interpolates=False, starts_early=False, drops_scores=False)
    yield "no early launch", 2, split, top_k
    top_k = replace(top_k, interpolates=True)
    yield "+ interpolates", 2, split, top_k
    split = replace(split, merges_early=True)
    yield "+ merges_early", 2, split, top_k
    top_k = replace(top_k, starts_early=True)
    yield "+ top-k starts_early", 2, split, top_k
    split = replace(split, starts_early=True)
    yield "+ attention starts_early", 2, split, top_k
    split = replace(split, prefetches=True)
    yield "+ prefetches", 2, split, top_k
    split = replace(split, keeps_scores=True)
    yield "+ keeps_scores", 2, split, top_k
    top_k = replace(top_k, drops_scores=True)
    yield "+ drops_scores", 2, split, top_k
    yield "these, 3 programs per SM", 3, split, top_k
    yield "these, 4 stages", 2, replace(split, num_stages=4), top_k
    more = replace(top_k, segments=32, num_warps=(top_k.num_warps[0], 16, 16))
    yield "these, 32 segments, 16 warps", 2, split, more
    fewer = replace(top_k, num_warps=(*top_k.num_warps[:2], 8))
    yield "these, select with 8 warps", 2, split, fewer
