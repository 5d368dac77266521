"""What scripts that time kernels do without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.seeded import new_rng

from gpu_ops.gather_rows import GatherLaunch
from gpu_ops.top_k_candidates import TopKLaunch
from perf import bench_gather, bench_heads
from perf.bench_gather import RECENT_TOKENS, SINK_TOKENS, clustered_selection
from perf.gpu_timing import launches


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench", [bench_gather, bench_heads])
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


def test_launches() -> None:
    assert list(launches(GatherLaunch(), [])) == [GatherLaunch()]
    found = list(launches(GatherLaunch(), ["heads_first=True,False", "num_warps=4,8,16"]))
    assert len(set(found)) == len(found) == 6
    assert {launch.num_warps for launch in found} == {4, 8, 16}
    assert {launch.programs for launch in found} == {4}
    tuples = launches(TopKLaunch(), ["num_warps=(4,8,16),(4,8,8)"])
    assert [launch.num_warps[2] for launch in tuples] == [16, 8]
    with pytest.raises(SystemExit, match="no field 'warps' in GatherLaunch"):
        list(launches(GatherLaunch(), ["warps=4"]))
