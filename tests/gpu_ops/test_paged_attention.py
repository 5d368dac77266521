"""All heads' attention to pages against float64: lengths about pages, tiles, splits, also mixed."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, Pages, assert_close, attention, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.paged_attention import num_kv_splits, retrieval_attention


def check(
    device: str,
    dtype: torch.dtype,
    kv_lens: list[int],
    *,
    head_dim: int = 64,
    num_kv_heads: int = 2,
    group_size: int = 3,
    page_tokens: int = 16,
    num_splits: int = 4,
    tolerance: float | None = None,
) -> None:
    rng = new_rng()
    n, num_qo_heads, sm_scale = len(kv_lens), num_kv_heads * group_size, head_dim**-0.5
    query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
    kv = [
        random(rng, 2, num_kv_heads, kv_len, head_dim, dtype=dtype, device=device)
        if kv_len
        else None
        for kv_len in kv_lens
    ]
    pages = Pages(rng, kv, page_tokens)
    partial = (n, num_qo_heads, num_splits)
    out = poisoned(n, num_qo_heads * head_dim, dtype=dtype, device=device)
    retrieval_attention(
        query,
        pages.table,
        torch.tensor(kv_lens, device=device) - 1,
        None,
        group_size=group_size,
        page_tokens=page_tokens,
        sm_scale=sm_scale,
        partial_out=poisoned(*partial, head_dim, dtype=torch.float32, device=device),
        partial_lse=poisoned(*partial, dtype=torch.float32, device=device),
        out=out,
    )
    for row, x in enumerate(kv):
        if x is None:
            assert (out[row] == 0).all()
        else:
            expected, _ = attention(query[row], x[0], x[1], sm_scale)
            assert_close(out[row], expected, tolerance or TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size"),
    combinations(DTYPES, [(64, 3), (128, 4), (128, 1), (96, 20)]),
)
def test_shapes(device: str, dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    check(device, dtype, [50, 0, 1], head_dim=head_dim, group_size=group_size)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 130])
def test_lengths(device: str, kv_len: int) -> None:
    check(device, torch.float32, [kv_len])


@pytest.mark.parametrize(("dtype", "page_tokens"), combinations(DTYPES, [32, 256]))
def test_pages_of_several_tiles(device: str, dtype: torch.dtype, page_tokens: int) -> None:
    check(device, dtype, [1, 255, 256, 257, 1027], num_kv_heads=1, page_tokens=page_tokens)


@pytest.mark.parametrize("num_splits", [1, 3, 33])
def test_splits(device: str, num_splits: int) -> None:
    check(device, torch.float32, [1, 40, 200, 700], num_kv_heads=1, num_splits=num_splits)


def test_batch_beyond_the_smallest_pieces(device: str) -> None:
    check(device, torch.float32, [5, 0, 300, 17, 64, 1, 0, 129, 16, 33], num_kv_heads=1)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group_size"), [(64, 3, 3), (128, 8, 4)])
def test_real_sizes(dtype: torch.dtype, head_dim: int, num_kv_heads: int, group_size: int) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    check(
        "cuda",
        dtype,
        [131072, 1, 4096, 0, 20011],
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        page_tokens=256,
        num_splits=num_kv_splits(num_kv_heads, multiprocessors),
        tolerance=4 * TOLERANCE[dtype],  # long sums of what nearly cancels
    )


@pytest.mark.cuda
def test_graph_replays_with_other_lengths() -> None:
    rng = new_rng()
    kv = random(rng, 2, 2, 100, 64, dtype=torch.bfloat16, device="cuda")
    query = random(rng, 1, 4 * 64, dtype=torch.bfloat16, device="cuda")
    pages = Pages(rng, [kv], 16)
    position = torch.tensor([0], device="cuda")
    out = torch.empty_like(query)
    partial = torch.empty(1, 4, 8, 64, device="cuda"), torch.empty(1, 4, 8, device="cuda")

    def run() -> None:
        retrieval_attention(
            query,
            pages.table,
            position,
            None,
            group_size=2,
            page_tokens=16,
            sm_scale=0.125,
            partial_out=partial[0],
            partial_lse=partial[1],
            out=out,
        )

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for kv_len in (1, 100, 17, 64):
        position.fill_(kv_len - 1)
        out.fill_(float("nan"))
        graph.replay()
        expected, _ = attention(query[0], kv[0, :, :kv_len], kv[1, :, :kv_len], 0.125)
        assert_close(out[0], expected, TOLERANCE[torch.bfloat16])


def test_number_of_splits() -> None:
    assert num_kv_splits(8, 132) == 33  # two programs on each multiprocessor
    assert num_kv_splits(3, 132) == 88
    assert num_kv_splits(1, 132) == 128
    assert num_kv_splits(64, 16) == 1


def test_wrong_operands() -> None:
    query, table = torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.int64)
    options = {
        "group_size": 1,
        "page_tokens": 16,
        "sm_scale": 1.0,
        "partial_out": torch.zeros(1, 2, 4, 64),
        "partial_lse": torch.zeros(1, 2, 4),
        "out": query.clone(),
    }
    position = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"page_tokens must be a power of two .* got 8"):
        retrieval_attention(query, table, position, None, **options | {"page_tokens": 8})
    with pytest.raises(ValueError, match="multiple of group_size, got 2 and 3"):
        retrieval_attention(query, table, position, None, **options | {"group_size": 3})
    small = {"partial_lse": torch.zeros(1, 2, 3)}
    with pytest.raises(ValueError, match=r"partial_lse must be \[1, 2, 4\], got \[1, 2, 3\]"):
        retrieval_attention(query, table, position, None, **options | small)
