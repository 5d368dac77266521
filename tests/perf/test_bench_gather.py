"""What perf.bench_gather and perf.bench_hybrid do without a GPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from cases.seeded import new_rng

from gpu_ops.hybrid_attention import HybridLaunch
from perf import bench_gather, bench_hybrid
from perf.bench_gather import RECENT_TOKENS, SINK_TOKENS, clustered_selection


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench", [bench_gather, bench_hybrid])
def test_refuses_without_a_gpu(bench: Any) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU, and torch sees none"):
        bench.main([])


@pytest.mark.parametrize("tokens", [1, 7, 16, 255, 1024])
def test_clustered_selection(tokens: int) -> None:
    selection = clustered_selection(new_rng(), 4096, tokens)
    assert selection.shape == (8, tokens)
    assert selection.dtype == np.int32
    assert (np.diff(selection, axis=1) > 0).all()
    assert selection.min() >= SINK_TOKENS
    assert selection.max() < 4096 - RECENT_TOKENS
    assert tokens < 16 or (np.diff(selection, axis=1) == 1).mean() > 0.4


def launches(**options: Any) -> list[tuple[int, HybridLaunch]]:
    names = ("tiles", "per_sm", "stages", "warps", "segment_tiles", "early", "prefetch")
    chosen = dict.fromkeys(names) | {"sweep": False, "block_tokens": 64} | options
    return list(bench_hybrid.launches(Namespace(**chosen)))


def test_launches() -> None:
    assert launches() == [(2, HybridLaunch())]
    found = launches(sweep=True)
    assert len(set(found)) == len(found) == 8
    assert {(launch.merges_early, launch.starts_early) for _, launch in found} == {
        (True, False),
        (True, True),
    }
    assert {launch.num_warps for _, launch in launches(warps=[4, 8])} == {4, 8}
    (_, launch), *_ = launches(early=["none"])
    assert not launch.merges_early
    assert not launch.starts_early
    # 96 KiB of shared memory each, of which a multiprocessor has room for two
    assert {per_sm for per_sm, _ in launches(per_sm=[1, 2, 3], stages=[4], tiles=[64])} == {1, 2}
