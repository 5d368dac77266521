"""fetch_rows: which rows arrive in which places, bit by bit, and that nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.host_pages import HostPages
from cases.operands import DTYPES, poisoned
from cases.seeded import new_rng

from gpu_ops.fetch_rows import fetch_rows
from gpu_ops.gather_rows import GatherLaunch

HEADS, NUM_KV_HEADS, CAPACITY = (2, 0), 3, 24


def run(
    device: str,
    dtype: torch.dtype,
    kv_lens: list[int],
    num_fetches: list[list[int]],
    **changes: Any,
) -> None:
    """Random tokens before the last into random places; what inactive rows have is no token."""
    rng, head_dim = new_rng(), changes.pop("head_dim", 64)
    sizes = {"head_dim": head_dim, "num_kv_heads": NUM_KV_HEADS, "page_tokens": 16}
    host, parts = HostPages(rng, device, dtype, kv_lens, **sizes), changes.pop("parts", 2)
    if parts == 1:
        keys = [kv[:1] for kv in host.kv]
        host = HostPages(rng, device, dtype, kv_lens, kv=keys, **sizes)
    n = len(kv_lens)
    hot_counts = torch.tensor([[[m, m + 2] for m in row] for row in num_fetches]).int()
    fetches = torch.full((n, NUM_KV_HEADS, CAPACITY, 2), 2**30, dtype=torch.int32)
    hot = poisoned(n, parts, len(HEADS), CAPACITY, head_dim, dtype=dtype, device=device)
    expected = torch.full(hot.shape, float("nan"), dtype=dtype)
    for row, kv_len in enumerate(kv_lens):
        for head in range(NUM_KV_HEADS if kv_len else 0):
            m = num_fetches[row][head]
            tokens, places = (
                torch.from_numpy(rng.permutation(size)[:m].copy())
                for size in (kv_len - 1, CAPACITY)
            )
            fetches[row, head, :m] = torch.stack((tokens, places), 1).int()
            if head in HEADS:
                expected[row, :, HEADS.index(head), places] = host.kv[row][:, head, tokens]
    counts = torch.full((n, NUM_KV_HEADS), -7, dtype=torch.int32, device=device)
    positions = torch.tensor(kv_lens, device=device) - 1
    clusters = changes.pop("clusters", 0)
    rest: dict[str, Any] = {}
    if clusters:
        left = torch.from_numpy(rng.integers(-1, 9, (n, NUM_KV_HEADS, clusters + 1))).int()
        left[..., -1] = torch.from_numpy(rng.integers(-1, clusters, (n, NUM_KV_HEADS)))
        new = torch.from_numpy(rng.standard_normal((n, NUM_KV_HEADS, 2, head_dim))).float()
        means = torch.zeros(n, 2, len(HEADS), clusters, head_dim, dtype=dtype, device=device)
        logs = poisoned(n, NUM_KV_HEADS, clusters, dtype=torch.float32, device=device)
        rest = {"rest_counts": left.to(device), "rest_means": new.to(device)}
        rest |= {"means": means, "log_counts": logs}
    fetch_rows(
        fetches.to(device),
        hot_counts.to(device),
        host.table,
        positions,
        torch.tensor(HEADS, dtype=torch.int32, device=device),
        page_tokens=16,
        sink_tokens=4,
        recent_tokens=8,
        hot=hot,
        counts=counts,
        **rest,
    )
    assert torch.equal(hot.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))
    for row, kv_len in enumerate(kv_lens if clusters else ()):
        for place, head in enumerate(HEADS):
            wanted = left[row, head, :-1].clamp_min(0).float() * (kv_len > 0)
            assert torch.allclose(logs[row, head].cpu(), wanted.log2())
            grown, of_clusters = int(left[row, head, -1]), torch.zeros(2, clusters, head_dim)
            if kv_len and grown >= 0:
                of_clusters[:, grown] = new[row, head]
            assert torch.equal(means[row, :, place].cpu(), of_clusters.to(dtype))
    for row, kv_len in enumerate(kv_lens):
        for head in HEADS:
            wanted = num_fetches[row][head] + 2 + 12 if kv_len else 0
            assert int(counts[row, head]) == wanted
    assert counts[:, 1].tolist() == [-7] * n  # of a head that has no hot rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_shapes(device: str, dtype: torch.dtype, head_dim: int) -> None:
    run(device, dtype, [50, 0, 37], [[20, 7, 12], [9, 9, 9], [1, 2, 3]], head_dim=head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clusters", [0, 12])
def test_keys_alone(device: str, dtype: torch.dtype, clusters: int) -> None:
    """Of pages; means are of both."""
    counts = [[20, 7, 12], [9, 9, 9], [1, 2, 3]]
    run(device, dtype, [50, 0, 37], counts, clusters=clusters, parts=1)


@pytest.mark.parametrize("clusters", [1, 12, 64])
def test_clusters(device: str, clusters: int) -> None:
    """Counts of inactive rows are none; means change where a cluster has grown."""
    counts = [[20, 7, 12], [9, 9, 9], [1, 2, 3], [0, 0, 0]]
    run(device, torch.bfloat16, [50, 0, 37, 40], counts, clusters=clusters)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 24])
@pytest.mark.parametrize("programs", [1, 3, 7])
def test_counts(device: str, programs: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the tiles, here of eight tokens, up to the capacity; programs with several lists, of
    which some are empty, and with none."""
    launch = GatherLaunch(programs=programs, tile_bytes=8 * 2 * 64 * 4)
    monkeypatch.setattr("gpu_ops.fetch_rows._LAUNCH", launch)
    counts = [[count, 3, 24 - count], [9, 9, 9], [24 - count, 3, count], [3, 3, 17]]
    run(device, torch.float32, [60, 0, 33, 50], counts)


def test_what_is_no_row_is_passed_over(device: str) -> None:
    """As an earlier, longer sequence may have left it: its pages are gone, and its places other."""
    rng, tokens = new_rng(), {"dtype": torch.int32, "device": device}
    host = HostPages(rng, device, torch.float32, [33], head_dim=64, num_kv_heads=1, page_tokens=16)
    pairs = [(40_000, 0), (32, 1), (-1, 2), (5, CAPACITY), (6, -1), (31, 3)]
    fetches = torch.full((1, 1, 6, 2), 2**30, **tokens)
    fetches[0, 0] = torch.tensor(pairs)
    hot = poisoned(1, 2, 1, CAPACITY, 64, dtype=torch.float32, device=device)
    fetch_rows(
        fetches,
        torch.tensor([[[2**20, 4]]], **tokens),
        host.table,
        torch.tensor([32], device=device),
        torch.zeros(1, **tokens),
        page_tokens=16,
        sink_tokens=4,
        recent_tokens=8,
        hot=hot,
        counts=torch.zeros(1, 1, **tokens),
    )
    written = hot[0, 0, 0, :, 0].isfinite().nonzero()[:, 0]
    assert written.tolist() == [3]
    assert torch.equal(hot[0, :, 0, 3].cpu(), host.kv[0][:, 0, 31])


def test_operands_that_do_not_fit(device: str) -> None:
    """Places for another number of heads than there are counts."""
    zeros = {"dtype": torch.int32, "device": device}
    with pytest.raises(ValueError, match=r"hot_counts must be \[1, 3, 2\], got \[1, 2, 2\]"):
        fetch_rows(
            torch.zeros(1, 3, 4, 2, **zeros),
            torch.zeros(1, 2, 2, **zeros),
            torch.zeros(1, 2, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, **zeros),
            page_tokens=16,
            sink_tokens=4,
            recent_tokens=8,
            hot=torch.zeros(1, 2, 1, 8, 64, device=device),
            counts=torch.zeros(1, 3, **zeros),
        )
