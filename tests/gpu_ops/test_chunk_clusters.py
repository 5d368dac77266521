"""Steps of clustering chunks against float64 and against one move after the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cases.operands import DTYPES, assert_close, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.chunk_clusters import chunk_boxes, fill_empty, mean_directions


def unit_rows(*shape: int, device: str) -> torch.Tensor:
    rows = random(new_rng(), *shape, dtype=torch.float32, device=device)
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("dtype", "head_dim"), combinations(DTYPES, [16, 48]))
def test_chunk_boxes(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Rows are strided; chunks have one token, no length, or are longer than a program's tile."""
    rows = random(new_rng(), 2, 90, head_dim, dtype=dtype, device=device)
    keys = rows[:, 5:85]
    keys[1, 20:30] = 0
    starts = [4, 20, 30, 31, 47, 79]
    points, centres, widths = chunk_boxes(keys, torch.tensor(starts, device=device))
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        chunk = keys[:, first:last].double()
        mean = chunk.mean(1)
        norm = mean.norm(dim=-1)
        assert_close(points[:, i], mean / torch.where(norm > 0, norm, 1.0)[:, None], 1e-6)
        low, high = chunk.amin(1), chunk.amax(1)
        assert_close(centres[:, i], (mean + (low + high) / 2) / 2, 1e-6)
        assert_close(widths[:, i], (high - low) / 2, 1e-6)
    assert (points[1, 1] == 0).all()


@pytest.mark.parametrize("num_clusters", [1, 5, 31])
def test_fill_empty(device: str, num_clusters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one after the other; points and clusters in more than one block."""
    monkeypatch.setattr("gpu_ops.chunk_clusters._SCAN", 16)
    rng = new_rng()
    labels = rng.integers(0, num_clusters, (2, 40)) // rng.integers(1, 5, (2, 1))
    products = rng.choice(np.linspace(0, 1, 12, dtype=np.float32), (2, 40))
    filled = torch.from_numpy(labels).to(device)
    fill_empty(filled, torch.from_numpy(products).to(device), num_clusters)
    for head in range(2):
        expected = labels[head].copy()
        counts = np.bincount(expected, minlength=num_clusters)
        worst = iter(np.argsort(products[head], kind="stable"))
        for cluster in np.flatnonzero(counts == 0):
            point = next(p for p in worst if counts[expected[p]] > 1)
            counts[expected[point]] -= 1
            expected[point], counts[cluster] = cluster, 1
        np.testing.assert_array_equal(filled[head].cpu().numpy(), expected)


def test_fill_empty_from_one_cluster(device: str) -> None:
    """All points alike: each goes to a cluster of its own."""
    labels = torch.zeros(1, 6, dtype=torch.int64, device=device)
    fill_empty(labels, torch.ones(1, 6, device=device), 6)
    assert labels.tolist() == [[1, 2, 3, 4, 5, 0]]


def test_mean_directions(device: str) -> None:
    points = unit_rows(2, 37, 48, device=device)
    points[1, 3] = 0
    labels = torch.from_numpy(new_rng().integers(0, 4, (2, 37))).to(device)
    labels[1][labels[1] == 2] = 1
    labels[1, 3] = 2
    sums = torch.zeros(2, 4, 48, dtype=torch.int64, device=device)
    centroids = torch.full((2, 4, 48), torch.nan, device=device)
    for _ in range(2):  # the second time with the scratch that the first has left
        mean_directions(points, labels, sums, centroids)
        assert not sums.any()
        for head in range(2):
            for cluster in range(4):
                total = points[head, labels[head] == cluster].double().sum(0)
                expected = total / max(float(total.norm()), 1e-30)
                assert_close(centroids[head, cluster], expected, 1e-6)


def test_sums_do_not_depend_on_the_order(device: str) -> None:
    points = unit_rows(1, 50, 32, device=device)
    order = torch.from_numpy(new_rng().permutation(50)).to(device)
    results = []
    for rows in (points, points[:, order].contiguous()):
        labels = torch.zeros(1, 50, dtype=torch.int64, device=device)
        centroids = torch.empty(1, 1, 32, device=device)
        mean_directions(rows, labels, labels.new_zeros(1, 1, 32), centroids)
        results.append(centroids)
    assert torch.equal(*results)


def test_wrong_operands() -> None:
    with pytest.raises(ValueError, match="3 points cannot fill 4 clusters"):
        fill_empty(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3), 4)
    with pytest.raises(ValueError, match=r"labels must be \[1, 3\], got \[1, 2\]"):
        mean_directions(
            torch.zeros(1, 3, 16),
            torch.zeros(1, 2, dtype=torch.int64),
            torch.zeros(1, 2, 16, dtype=torch.int64),
            torch.zeros(1, 2, 16),
        )
    with pytest.raises(ValueError, match="rows of keys must be contiguous"):
        chunk_boxes(torch.zeros(1, 16, 32).mT, torch.tensor([0, 8]))
