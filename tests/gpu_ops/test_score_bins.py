"""Bins of scores and the keys that bound them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_ops.launch import has_triton, jit, runs_kernel, tl
from gpu_ops.score_bins import BINS, INFINITE_KEY, first_key, score_bin, score_key

pytestmark = pytest.mark.skipif(not has_triton, reason="triton is not installed")


@jit
def bins_kernel(
    scores: tl.tensor, keys: tl.tensor, bins: tl.tensor, first: tl.tensor, SIZE: tl.constexpr
) -> None:
    """Keys and bins of scores, and the smallest keys of those bins and of the next ones."""
    i = tl.arange(0, SIZE)
    score = tl.load(scores + i)
    place = score_bin(score)
    tl.store(keys + i, score_key(score))
    tl.store(bins + i, place)
    tl.store(first + i, first_key(place))
    tl.store(first + SIZE + i, first_key(place + 1))


def test_bins_hold_the_keys_between_their_bounds(device: str) -> None:
    if not runs_kernel(torch.empty(0, device=device)):
        pytest.skip("bins are a kernel's only, and none runs here")
    size = 16384
    rng = np.random.default_rng(0)
    steps = np.arange(-40 * 16, 40 * 16)
    bounds = np.float32(2.0) ** (steps // 16) * (1 + steps % 16 / 16).astype(np.float32)
    around = [np.nextafter(bounds, np.float32(x)) for x in (-np.inf, np.inf)]
    positive = np.concatenate(
        [bounds, *around, rng.integers(1, INFINITE_KEY, 3000).astype(np.int32).view(np.float32)]
    )
    some = np.concatenate([positive, -positive, [0.0, np.inf, -np.inf, np.nan]])
    scores = torch.zeros(size, dtype=torch.float32)
    scores[: len(some)] = torch.from_numpy(some.astype(np.float32))
    scores = scores.to(device)
    keys, bins = (torch.full((size,), -7, dtype=torch.int32, device=device) for _ in range(2))
    first = torch.full((2, size), -7, dtype=torch.int32, device=device)
    bins_kernel[(1,)](scores, keys, bins, first, size)
    assert (first[0] <= keys).all()
    assert (keys < first[1]).all()
    is_finite = scores.isfinite()
    assert (bins[is_finite] < BINS - 1).all()
    assert (bins[~is_finite] == BINS - 1).all()
    assert (keys[~is_finite] == INFINITE_KEY).all()
    order = scores[is_finite].argsort()
    assert (keys[is_finite][order].diff() >= 0).all()
    assert (bins[is_finite][order].diff() >= 0).all()
    assert len(bins.unique()) > 1000
