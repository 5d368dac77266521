"""Decode attention kernels against float64, over ISA x dtype x shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import TOLERANCE, Cache, attend, random_queries, relative_error
from cases.chosen_tokens import Chosen, ChosenPerQueryHead
from cases.pairwise import pairwise
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.policies import Full

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = native.available_isas()
LENGTHS = [1, 2, 255, 256, 257, 1027]


def queries_of(cache: Cache, rng: np.random.Generator, group_size: int, n: int = 1) -> torch.Tensor:
    heads = cache.store.num_kv_heads * group_size
    return random_queries(rng, n, heads, cache.store.head_dim, cache.store.dtype)


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "group_size", "softcap"),
    pairwise(
        ISAS,
        DTYPES,
        [32, 48, 64, 96, 128, 256, 576],
        [1, 2, 3, 4, 7, 8, 128],
        [0.0, 1.5],
        together=2,
    ),
    ids=str,
)
def test_dense_matches_reference(isa, dtype, head_dim, group_size, softcap, pool):
    rng = new_rng()
    for kv_len in LENGTHS:
        cache = Cache.random(rng, kv_len=kv_len, head_dim=head_dim, dtype=dtype)
        queries = queries_of(cache, rng, group_size)
        out, lse = attend(
            cache.attention(pool, group_size, isa=isa, softcap=softcap),
            [cache.seq],
            [kv_len],
            queries,
        )
        expected, expected_lse, _ = cache.expected(queries, kv_len, softcap=softcap)
        assert relative_error(out[0], expected) < TOLERANCE[dtype], kv_len
        np.testing.assert_allclose(lse[0], expected_lse, atol=2e-4)


def attend_to(
    cache: Cache,
    pool: WorkerPool,
    queries: torch.Tensor,
    selection: list[np.ndarray],
    *,
    isa: str | None = None,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """o, lse and weights of one query row that attends to a list of tokens per head."""
    num_qo_heads = queries.shape[1] // cache.store.head_dim
    per_kv_head = len(selection) == cache.store.num_kv_heads
    policy = (Chosen if per_kv_head else ChosenPerQueryHead)(
        budget_tokens=cache.kv_len - 1, dense_layers=1, selection=selection
    )
    attention = cache.attention(
        pool, num_qo_heads // cache.store.num_kv_heads, policy, isa, softcap
    )
    out, lse = attend(attention, [cache.seq], [cache.kv_len], queries)
    state = attention.states.arrays_of(cache.seq)
    assert state is not None
    group_size = num_qo_heads // len(selection)
    ends = np.cumsum([len(tokens) for tokens in selection])[:-1] * group_size
    weights = np.split(state.layers[cache.layer_idx]["weights"], ends)
    return out[0], lse[0], [row for of_unit in weights for row in np.split(of_unit, group_size)]


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "group_size", "per_query_head", "softcap"),
    pairwise(
        ISAS, DTYPES, [48, 64, 128, 256, 576], [1, 3, 4, 8], [False, True], [0.0, 1.5], together=2
    ),
    ids=str,
)
def test_chosen_tokens_match_reference(
    isa, dtype, head_dim, group_size, per_query_head, softcap, pool
):
    rng = new_rng()
    kv_len = 1500
    cache = Cache.random(rng, kv_len=kv_len, head_dim=head_dim, dtype=dtype, page_tokens=64)
    num_units = cache.store.num_kv_heads * (group_size if per_query_head else 1)
    lengths = [1, 3, 31, 32, 33, 400, kv_len - 1, 5, 64, 129, 2, 40, 96, 200, 97, 65]
    selection = [
        np.append(np.sort(rng.choice(kv_len - 1, n - 1, replace=False)), kv_len - 1)
        for n in rng.permutation(lengths[:num_units])
    ]
    queries = queries_of(cache, rng, group_size)
    out, lse, weights = attend_to(cache, pool, queries, selection, isa=isa, softcap=softcap)
    expected, expected_lse, expected_weights = cache.expected(queries, kv_len, selection, softcap)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected_lse, atol=2e-4)
    for actual, weight in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(actual, weight, atol=2e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("page_tokens", [4, 256])
def test_batch_of_ragged_rows(threads, page_tokens):
    """Several sequences and several rows of one sequence, split over any number of threads."""
    rng = new_rng()
    pool = WorkerPool(threads)
    cache = Cache.random(rng, kv_len=900, page_tokens=page_tokens, dtype=torch.float32)
    fork = cache.store.fork(cache.seq)
    kv_lens = [900, 1, 899, 257, 256]
    seqs = [cache.seq, fork, cache.seq, fork, cache.seq]
    queries = queries_of(cache, rng, 3, n=5)
    out, lse = attend(cache.attention(pool, 3), seqs, kv_lens, queries)
    for row, kv_len in enumerate(kv_lens):
        expected, expected_lse, _ = cache.expected(queries[row], kv_len)
        assert relative_error(out[row], expected) < TOLERANCE[torch.float32]
        np.testing.assert_allclose(lse[row], expected_lse, atol=1e-5)
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_lengths_that_split_unevenly(threads):
    """A page and a bit: no piece may be empty, whatever earlier calls left in the scratch."""
    rng = new_rng()
    pool = WorkerPool(threads)
    cache = Cache.random(rng, kv_len=1300, num_kv_heads=4)
    attention = cache.attention(pool, 1)
    for kv_len in (1300, 257, 300, 512, 513, 1025, 260):
        queries = queries_of(cache, rng, 1)
        out, _ = attend(attention, [cache.seq], [kv_len], queries)
        expected, _, _ = cache.expected(queries, kv_len)
        assert relative_error(out[0], expected) < TOLERANCE[torch.float32], kv_len
    pool.close()


@pytest.mark.parametrize("isa", ISAS)
def test_partial_results_merge_exactly(isa, pool):
    """Attention over two halves, merged by (o, lse), is attention over the whole."""
    rng = new_rng()
    kv_len, group_size = 700, 4
    cache = Cache.random(rng, kv_len=kv_len)
    queries = queries_of(cache, rng, group_size)
    o, lse = attend(cache.attention(pool, group_size, isa=isa), [cache.seq], [300], queries)
    rest = [np.arange(300, kv_len)] * cache.store.num_kv_heads
    parts = o[0], lse[0], *attend_to(cache, pool, queries, rest, isa=isa)[:2]
    out, lse = reference.merge_softmax(*parts)
    expected, expected_lse, _ = cache.expected(queries, kv_len)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_and_tiny_scores(isa, dtype, pool):
    """Scores far apart neither overflow nor lose the winner."""
    rng = new_rng()
    cache = Cache.random(rng, kv_len=600, dtype=dtype)
    queries = (queries_of(cache, rng, 4).float() * 100).to(dtype)
    out, lse = attend(cache.attention(pool, 4, isa=isa), [cache.seq], [600], queries)
    expected, expected_lse, _ = cache.expected(queries, 600)
    # Scores near 1,000 carry float32 rounding of 1e-4, which the exponential makes relative.
    assert relative_error(out[0], expected) < 1e-3 + TOLERANCE[dtype]
    np.testing.assert_allclose(lse[0], expected_lse, rtol=1e-5, atol=1e-2)


def row_bits(cache: Cache, side: int, token: int) -> np.ndarray:
    """Bytes of a token's key (side 0) or value of KV head 0, in the store."""
    raw = cache.store.page_table(cache.seq)[1, token // 256]
    row_bytes = cache.store.head_dim * cache.store.dtype.itemsize
    address = int(raw) + (side * 2 * 256 + token % 256) * row_bytes
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * row_bytes).from_address(address))


@pytest.mark.parametrize(
    ("isa", "dtype", "bad"), combinations(ISAS, DTYPES, [np.nan, np.inf, -np.inf])
)
def test_infinity_is_reported(isa, dtype, bad, pool):
    """In the query, in any value, in a key that pulls it to inf; in the newest token's key anyhow,
    whose score may be -inf: no weight now, and any other later.
    """
    rng = new_rng()
    good = queries_of(Cache.random(rng, kv_len=1, dtype=dtype), rng, 2)
    for side, token, sign in (
        ("query", 0, 1),
        *((side, token, 1) for side in ("keys", "values") for token in (0, 130, 299)),
        ("keys", 299, -1),
        ("values", 299, -1),
    ):
        cache, queries = Cache.random(rng, kv_len=300, dtype=dtype), good.clone()
        queries[0, 7] = queries[0, 64 + 7] = 1.0 if sign * bad > 0 else -1.0  # of KV head 0
        if side == "query":
            queries[0, 7] = bad
        else:
            of_side = row_bits(cache, ("keys", "values").index(side), token)
            element = slice(7 * dtype.itemsize, 8 * dtype.itemsize)
            number = torch.tensor([bad]).to(dtype).view(torch.uint8)
            of_side[element] = number.numpy()
        with pytest.raises(RuntimeError, match="non-finite attention in layer 1, query row 0"):
            attend(cache.attention(pool, 2, isa=isa), [cache.seq], [300], queries)


def test_bad_input_is_refused(pool):
    rng = np.random.default_rng(0)
    cache = Cache.random(rng, kv_len=300)
    message = "num_qo_heads must be a multiple of num_kv_heads=2, got 3"
    with pytest.raises(ValueError, match=message):
        DecodeAttention(Full(), cache.store, num_qo_heads=3, pool=pool)
    with pytest.raises(ValueError, match="at most 128 query heads may share a KV head, got 129"):
        cache.attention(pool, 129)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16 up to 576, got 24"):
        Cache.random(rng, kv_len=4, head_dim=24).attention(pool, 1)
    attention = cache.attention(pool, 2)
    with pytest.raises(ValueError, match=r"kv_len of sequence .* must be in \[1, 512\]"):
        attention.begin_step([cache.seq], [513])
    with pytest.raises(ValueError, match="one kv_len per row, got 2 and 1"):
        attention.begin_step([cache.seq, cache.seq], [300])
    step = attention.begin_step([cache.seq], [300])
    good = torch.zeros(1, 4 * 64)
    for query, message in (
        (good.double(), "query must be torch.float32"),
        (good[:, :-1], r"query must be \[1, >= 256\]"),
        (torch.zeros(2, 256), r"query must be \[1, >= 256\]"),
        (torch.zeros(1, 512)[:, ::2], "unit column stride"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.attend(1, step, query, good.clone())
