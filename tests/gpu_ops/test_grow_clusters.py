"""grow_clusters against float64: which cluster takes the token, and its means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.operands import DTYPES, random
from cases.seeded import new_rng

from gpu_ops.choose_places import HotMap
from gpu_ops.grow_clusters import grow_clusters
from gpu_ops.layout import allocate

SINKS, RECENT, NUM_KV_HEADS, HEADS, MAX_TOKENS = 2, 5, 3, (2, 0), 40


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("clusters", "head_dim", "parts"), [(1, 64, 2), (7, 96, 2), (64, 128, 2), (7, 96, 1)]
)
def test_growing(device: str, dtype: torch.dtype, clusters: int, head_dim: int, parts: int) -> None:
    """Rows that are active or not, too short, without clusters, and that take a step again."""
    rng, positions = new_rng(), [20, -1, SINKS + RECENT - 2, 30, 25]
    n, tensors = len(positions), {"dtype": dtype, "device": device}
    window = random(rng, n, parts, NUM_KV_HEADS, SINKS + RECENT, head_dim, **tensors)
    means = random(rng, n, 2, len(HEADS), clusters, head_dim, **tensors)
    sizes = {"max_tokens": MAX_TOKENS, "capacity": 8, "clusters": clusters}
    hot_map = HotMap(**allocate(HotMap.layout(n, 3, **sizes), torch.device(device)))
    hot_map.cluster_of.fill_(255)
    counts = torch.from_numpy(rng.integers(0, 9, (n, 3, clusters))).int()
    counts[..., 0] = 3
    counts[3] = 0
    hot_map.cluster_counts.copy_(counts)
    hot_map.cluster_of[4, 2, 25 + 1 - RECENT] = 0
    before, taken = means.double().cpu().numpy(), counts.clone()
    for _ in range(2):
        grow_clusters(
            window,
            torch.tensor(positions, device=device),
            torch.tensor(HEADS, dtype=torch.int32, device=device),
            means,
            hot_map,
            first_head=1,
            sink_tokens=SINKS,
            recent_tokens=RECENT,
        )
    expected, num_joined = before.copy(), 0
    for row, i in np.ndindex(n, len(HEADS)):
        token = positions[row] + 1 - RECENT
        if token < SINKS or row == 3 or (row, i) == (4, 1):
            continue
        place = SINKS + (token - SINKS) % RECENT
        kv = window[row, :, HEADS[i], place].double().cpu().numpy()
        key, value = kv[0], kv[-1]  # keys alone are the values
        exists = counts[row, 1 + i].numpy() > 0
        norms = np.linalg.norm(before[row, 0, i], axis=-1)
        best = int(np.where(exists, before[row, 0, i] @ key / norms, -np.inf).argmax())
        taken[row, 1 + i, best] += 1
        assert int(hot_map.cluster_of[row, 1 + i, token]) == best
        for side, x in enumerate((key, value)):
            mean = before[row, side, i, best]
            expected[row, side, i, best] = mean + (x - mean) / int(taken[row, 1 + i, best])
        num_joined += 1
    assert num_joined == 3
    assert torch.equal(hot_map.cluster_counts.cpu(), taken)
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert np.allclose(means.double().cpu().numpy(), expected, atol=tolerance)
    assert int((hot_map.cluster_of != 255).sum()) == num_joined + 1


def test_operands_that_do_not_fit(device: str) -> None:
    sizes = {"max_tokens": MAX_TOKENS, "capacity": 8, "clusters": 4}
    hot_map = HotMap(**allocate(HotMap.layout(1, 3, **sizes), torch.device(device)))
    with pytest.raises(ValueError, match=r"first_head in \[0, 1\], got 5 and 2"):
        grow_clusters(
            torch.zeros(1, 2, NUM_KV_HEADS, SINKS + RECENT, 64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
            torch.zeros(1, 2, 2, 4, 64, device=device),
            hot_map,
            first_head=2,
            sink_tokens=SINKS,
            recent_tokens=RECENT,
        )
