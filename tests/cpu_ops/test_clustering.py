"""Clustering kernels against float64 references, over ISA x dtype x shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import relative_error
from cases.pairwise import pairwise
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.clustering import chunk_boxes, rank_rows, spherical_kmeans
from cpu_ops.worker_pool import WorkerPool

ISAS = native.available_isas()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def unit_points(rng: np.random.Generator, *shape: int) -> np.ndarray:
    points = rng.standard_normal(shape, dtype=np.float32)
    return points / np.linalg.norm(points, axis=-1, keepdims=True)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.parametrize(
    ("isa", "head_dim", "num_queries"),
    pairwise(ISAS, [16, 48, 64, 128, 256, 576], [1, 2, 3, 4, 5, 7, 128]),
)
def test_rank_rows(isa, head_dim, num_queries):
    """Also of the widest boxes there are, whose sums are the largest."""
    rng = new_rng()
    query = rng.standard_normal((num_queries, head_dim), dtype=np.float32)
    query[0] = 1
    for n in (1, 3, 4, 5, 19, 63, 64, 65, 131):
        low, high = rng.integers(-7, 8, (n, head_dim)), rng.integers(0, 16, (n, head_dim))
        high[0] = 15
        rows = (low & 15 | high << 4).astype(np.uint8).view(np.int8)
        bits = bfloat16_bits(rng.random((2, n), dtype=np.float32))
        scales, spreads = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        ranks = rank_rows(query, rows, bits[0], bits[1], 2.4, isa=isa).numpy()
        # Queries count in steps of 1/127 of their largest value, squares in 1/16383.
        largest = np.abs(query).max(axis=1, keepdims=True)
        wide = np.rint(query * (np.float32(127) / largest)) * (largest.astype(np.float64) / 127)
        exact = query.astype(np.float64)
        of_boxes = np.linalg.norm(exact[:, None] * high, axis=2) * spreads * 2.4
        expected = (wide @ low.T) * scales + of_boxes
        limit = (np.abs(wide) @ np.abs(low).T) * scales + of_boxes
        assert (np.abs(ranks - expected.max(axis=0)) <= 5e-4 * limit.max(axis=0)).all()


@pytest.mark.parametrize(("isa", "head_dim"), combinations(ISAS, [48, 64]))
def test_rank_rows_of_ranges(isa, head_dim):
    """In their order, empty ones and the last row included."""
    rng = new_rng()
    query = rng.standard_normal((3, head_dim), dtype=np.float32)
    rows = rng.integers(-127, 128, (200, head_dim), dtype=np.int8)
    scales, spreads = bfloat16_bits(rng.random((2, 200), dtype=np.float32))
    given = (scales, spreads, 0.4)
    every = rank_rows(query, rows, *given, isa=isa).numpy()
    ranges = np.array([[130, 200], [7, 7], [3, 72], [0, 2], [199, 200]], np.int32)
    expected = np.concatenate([every[first:end] for first, end in ranges])
    of_ranges = rank_rows(query, rows, *given, ranges=ranges, isa=isa)
    np.testing.assert_allclose(of_ranges, expected, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_rank_rows_of_what_is_no_number(isa):
    """Queries without steps rank 0; one that is not finite makes all ranks NaN; rows whose scale is
    none rank last."""
    rows = np.full((6, 48), 3, np.int8)  # the high halves are 0
    ones = bfloat16_bits(np.ones(6, np.float32))
    query = np.ones((3, 48), np.float32)
    query[1], query[2] = 0, 1e-40
    np.testing.assert_allclose(rank_rows(query, rows, ones, ones, 2.0, isa=isa), 144, rtol=1e-6)
    assert (rank_rows(query[1:], rows, ones, ones, 2.0, isa=isa) == 0).all()
    no_number, infinite = ones.copy(), ones.copy()
    no_number[2], infinite[2] = bfloat16_bits(np.array([np.nan, np.inf], np.float32))
    for scales, spreads in ((no_number, ones), (ones, infinite)):  # infinite times 0
        ranks = rank_rows(query[:1], rows, scales, spreads, 2.0, isa=isa).numpy()
        assert ranks[2] == -np.inf
        np.testing.assert_allclose(np.delete(ranks, 2), 144, rtol=1e-6)
    negative = np.full((6, 48), 13, np.int8)  # -3 in the low halves
    assert rank_rows(query[:1], negative, infinite, ones, 2.0, isa=isa)[2] == -np.inf
    for bad in (np.nan, np.inf, -np.inf):
        query[1, 40] = bad
        assert rank_rows(query, rows, ones, ones, 2.0, isa=isa).isnan().all()


@pytest.mark.parametrize(("isa", "dtype", "head_dim"), combinations(ISAS, DTYPES, [16, 64, 128]))
def test_chunk_boxes(isa, dtype, head_dim, pool):
    rng = new_rng()
    lengths = rng.choice([1, *range(3, 17)], 150)
    starts = np.concatenate([[16], 16 + np.cumsum(lengths)])
    keys = torch.from_numpy(rng.standard_normal((3, int(starts[-1]) + 5, head_dim))).to(dtype)
    wide = keys.double().numpy()
    expected = reference.chunk_means(wide, starts)
    # As the store's pages hold them too: heads inside tokens.
    for given in (keys, keys.transpose(0, 1).contiguous().transpose(0, 1)):
        points, centres, widths = chunk_boxes(pool, given, starts, isa=isa)
        assert relative_error(points, expected) < 1e-6
        for i in range(len(starts) - 1):
            chunk = wide[:, starts[i] : starts[i + 1]]
            low, high = chunk.min(axis=1), chunk.max(axis=1)
            centre = (chunk.mean(axis=1) + (low + high) / 2) / 2
            np.testing.assert_allclose(centres[:, i], centre, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(widths[:, i], (high - low) / 2, rtol=1e-5, atol=1e-6)


def test_a_mean_of_zero_stays_zero(pool):
    keys = torch.ones(1, 8, 16)
    keys[:, 1::2] = -1
    points, centres, widths = chunk_boxes(pool, keys, np.array([0, 4, 8]))
    assert not points.any()
    assert not centres.any()
    assert (widths == 1).all()


@pytest.mark.parametrize(
    ("isa", "head_dim", "sizes"),
    pairwise(ISAS, [16, 64, 128], [(1, 1), (5, 5), (97, 48), (130, 65), (300, 64), (193, 1)]),
)
def test_one_step_finds_the_nearest(isa, head_dim, sizes, pool):
    """Labels are the nearest of the initial centroids; near-ties may go either way."""
    n, k = sizes
    rng = new_rng()
    points = unit_points(rng, 3, n, head_dim)
    labels, centroids = spherical_kmeans(pool, points, k, 1, isa=isa)
    for head in range(3):
        wide = points[head].astype(np.float64)
        products = wide @ wide[np.arange(k) * n // k].T
        chosen = products[np.arange(n), labels[head]]
        np.testing.assert_allclose(chosen, products.max(axis=1), atol=1e-6)
        assert (np.bincount(labels[head], minlength=k) > 0).all()
        expected = reference.normalized_means(wide, labels[head], k)
        assert relative_error(centroids[head], expected) < 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_it_ends_where_every_point_has_its_nearest_centroid(isa, pool):
    """And as good as the reference gets: near-ties on the way may lead to another optimum."""
    rng = new_rng()
    centers = unit_points(rng, 20, 64)
    points = centers[rng.integers(0, 20, (2, 250))] + 0.5 * unit_points(rng, 2, 250, 64)
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    labels, centroids = spherical_kmeans(pool, points, 30, 100, isa=isa)
    for head in range(2):
        wide = points[head].astype(np.float64)
        products = wide @ centroids[head].astype(np.float64).T
        chosen = products[np.arange(250), labels[head]]
        np.testing.assert_allclose(chosen, products.max(axis=1), atol=1e-5)
        expected_labels, expected = reference.spherical_kmeans(wide, 30, 100)
        best = (wide * expected[expected_labels]).sum()
        assert abs(chosen.sum() / best - 1) < 0.01


@pytest.mark.parametrize("isa", ISAS)
def test_no_cluster_is_empty(isa, pool):
    """Many equal points empty the clusters that start on them."""
    rng = new_rng()
    points = np.repeat(unit_points(rng, 1, 12, 32), 8, axis=1)
    for k in (12, 40, 96):
        labels, centroids = spherical_kmeans(pool, points, k, 10, isa=isa)
        assert sorted(set(labels[0])) == list(range(k))
        np.testing.assert_allclose(np.linalg.norm(centroids, axis=-1), 1, rtol=1e-5)


def test_iterations_improve_and_threads_change_nothing(pool):
    rng = new_rng()
    points = unit_points(rng, 2, 400, 32)

    def fit(iterations: int) -> float:
        labels, centroids = spherical_kmeans(pool, points, 50, iterations)
        own = np.take_along_axis(centroids, labels[..., None].astype(np.int64), axis=1)
        return float((own * points).sum())

    assert fit(1) < fit(3) <= fit(10) * (1 + 1e-6)
    alone = WorkerPool(1)
    for ours, theirs in zip(
        spherical_kmeans(pool, points, 50), spherical_kmeans(alone, points, 50), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    alone.close()


def test_bad_arguments(pool):
    points = np.zeros((1, 4, 16), np.float32)
    with pytest.raises(ValueError, match=r"num_clusters must be in \[1, 4\]"):
        spherical_kmeans(pool, points, 5)
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        spherical_kmeans(pool, points, 2, 0)
    with pytest.raises(ValueError, match="points must be C-contiguous float32"):
        spherical_kmeans(pool, points.astype(np.float64), 2)
    with pytest.raises(ValueError, match=r"starts must increase within \[0, 9\]"):
        chunk_boxes(pool, torch.zeros(1, 9, 16), np.array([0, 8, 8]))
    with pytest.raises(ValueError, match="keys must be"):
        chunk_boxes(pool, torch.zeros(9, 16), np.array([0, 8]))
    query, rows, wrong = np.zeros((1, 32), np.float32), np.zeros((2, 32), np.int8), np.zeros(2)
    scales = wrong.astype(np.uint16)
    given = (scales, scales, 0.4)
    with pytest.raises(ValueError, match=r"int8 rows of their width, got .* 16"):
        rank_rows(query[:, :16], rows, *given)
    with pytest.raises(ValueError, match=r"scales as uint16 .*, got float64 \[2\]"):
        rank_rows(query, rows, wrong, scales, 0.4)
    with pytest.raises(ValueError, match=r"spreads as uint16 .*, got float64 \[2\]"):
        rank_rows(query, rows, scales, wrong, 0.4)
    with pytest.raises(ValueError, match="1 to 128 queries, got 129"):
        rank_rows(query.repeat(129, 0), rows, *given)
    with pytest.raises(ValueError, match=r"ranges must lie within \[0, 2\], got \[\[0, 3\]\]"):
        rank_rows(query, rows, *given, ranges=np.array([[0, 3]], np.int32))
