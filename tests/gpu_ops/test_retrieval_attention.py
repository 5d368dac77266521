"""retrieval_attention against float64: some heads of several, lengths about pages and splits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, Pages, assert_close, attention, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.paged_attention import num_retrieval_splits, retrieval_attention


def check(
    device: str,
    dtype: torch.dtype,
    kv_lens: list[int],
    *,
    heads: tuple[int, ...] = (1,),
    num_kv_heads: int = 3,
    head_dim: int = 64,
    group_size: int = 3,
    page_tokens: int = 16,
    num_splits: int = 4,
    with_scores: bool = True,
    tolerance: float | None = None,
) -> None:
    rng = new_rng()
    n, num_qo_heads, sm_scale = len(kv_lens), num_kv_heads * group_size, head_dim**-0.5
    query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
    kv = [
        random(rng, 2, len(heads), kv_len, head_dim, dtype=dtype, device=device) if kv_len else None
        for kv_len in kv_lens
    ]
    pages = Pages(rng, kv, page_tokens)
    float32 = {"dtype": torch.float32, "device": device}
    out, lse = poisoned(n, num_qo_heads * head_dim, **float32), poisoned(n, num_qo_heads, **float32)
    max_tokens = pages.table.shape[1] * page_tokens
    scores = poisoned(n, len(heads), group_size, max_tokens, **float32)
    retrieval_attention(
        query,
        pages.table,
        torch.tensor(kv_lens, device=device) - 1,
        torch.tensor(heads, dtype=torch.int32, device=device),
        group_size=group_size,
        page_tokens=page_tokens,
        sm_scale=sm_scale,
        partial_out=poisoned(n, num_qo_heads, num_splits, head_dim, **float32),
        partial_lse=poisoned(n, num_qo_heads, num_splits, **float32),
        out=out,
        lse=lse,
        scores=scores if with_scores else None,
    )
    others = [head for head in range(num_kv_heads) if head not in heads]
    of_out, of_lse = out.view(n, num_kv_heads, -1), lse.view(n, num_kv_heads, -1)
    assert of_out[:, others].isnan().all()
    assert of_lse[:, others].isnan().all()
    tolerance = tolerance or TOLERANCE[dtype]
    for row, (x, kv_len) in enumerate(zip(kv, kv_lens, strict=True)):
        chosen = list(heads)
        assert scores[row, :, :, kv_len:].isnan().all()  # there is no token
        if x is None:
            assert (of_out[row, chosen] == 0).all()
            assert (of_lse[row, chosen] == float("-inf")).all()
            continue
        q = query[row].view(num_kv_heads, -1)[chosen].flatten()
        expected, expected_lse = attention(q, x[0], x[1], sm_scale)
        assert_close(of_out[row, chosen].flatten(), expected, tolerance)
        # Rounding the weights to the dtype makes no difference to their sum.
        assert_close(of_lse[row, chosen].flatten(), expected_lse, 4 * TOLERANCE[torch.float32])
        grouped = q.double().view(len(heads), group_size, head_dim)
        products = grouped @ x[0].double().transpose(1, 2) * (sm_scale * math.log2(math.e))
        if with_scores:
            assert_close(scores[row, :, :, :kv_len], products, 4 * TOLERANCE[torch.float32])
        else:
            assert scores[row].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size"),
    combinations(DTYPES, [(64, 3), (128, 4), (128, 1), (64, 7)]),
)
def test_shapes(device: str, dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    check(device, dtype, [50, 0, 1], head_dim=head_dim, group_size=group_size, heads=(0, 2))


def test_lengths(device: str) -> None:
    check(device, torch.float32, [1, 15, 16, 17, 31, 32, 33, 64, 67, 130])


@pytest.mark.parametrize("heads", [(0,), (3,), (0, 1), (1, 3), (0, 1, 2, 3)])
def test_heads(device: str, heads: tuple[int, ...]) -> None:
    check(device, torch.float32, [40, 17], heads=heads, num_kv_heads=4, group_size=1)


@pytest.mark.parametrize(
    ("with_scores", "num_splits"), combinations([True, False], [1, 3, 65, 130])
)
def test_splits(device: str, num_splits: int, with_scores: bool) -> None:
    check(
        device,
        torch.float32,
        [1, 40, 200, 0, 700],
        num_splits=num_splits,
        with_scores=with_scores,
        head_dim=96,
        group_size=2,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_several_tiles(device: str, dtype: torch.dtype) -> None:
    check(device, dtype, [1, 255, 256, 257, 600], page_tokens=256)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "group_size", "heads"),
    [(64, 3, (0, 2)), (128, 4, (5,)), (128, 4, tuple(range(8)))],
)
def test_real_sizes(
    dtype: torch.dtype, head_dim: int, group_size: int, heads: tuple[int, ...]
) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    check(
        "cuda",
        dtype,
        [131072, 1, 4096, 0, 20011],
        heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        group_size=group_size,
        page_tokens=256,
        num_splits=num_retrieval_splits(len(heads), multiprocessors),
        tolerance=4 * TOLERANCE[dtype],  # long sums of what nearly cancels
    )


def test_number_of_splits() -> None:
    assert num_retrieval_splits(8, 132) == 33  # two programs on each multiprocessor
    assert num_retrieval_splits(1, 132) == 264
    assert num_retrieval_splits(64, 16) == 1
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        num_retrieval_splits(0, 132)


def test_wrong_operands() -> None:
    query, table = torch.zeros(1, 128), torch.zeros(1, 2, dtype=torch.int64)
    position, heads = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    options = {
        "group_size": 1,
        "page_tokens": 16,
        "sm_scale": 1.0,
        "partial_out": torch.zeros(1, 2, 4, 64),
        "partial_lse": torch.zeros(1, 2, 4),
        "out": query.clone(),
        "lse": torch.zeros(1, 2),
    }

    def refuses(message: str, *, head_list: torch.Tensor = heads, **changed: Any) -> None:
        with pytest.raises(ValueError, match=message):
            retrieval_attention(query, table, position, head_list, **options | changed)

    refuses(r"page_tokens must be a power of two .* got 8", page_tokens=8)
    refuses("multiple of group_size, got 2 and 3", group_size=3)
    refuses("heads must be 1 to 1 KV heads, got 2", group_size=2, head_list=heads.repeat(2))
    refuses("heads must be torch.int32, got torch.int64", head_list=heads.long())
    refuses(r"partial_lse must be \[1, 2, 4\], got \[1, 2, 3\]", partial_lse=torch.zeros(1, 2, 3))
    refuses("room for all pages' 32 tokens, got 31", scores=torch.zeros(1, 1, 1, 31))
    refuses(r"scores must be \[1, 1, 1, 32\]", scores=torch.zeros(1, 1, 2, 32))
    refuses(r"num_splits must be in 1..1024", partial_out=torch.zeros(1, 2, 1025, 64))
