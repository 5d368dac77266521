"""Attention over int8 keys and values, and how they are written, over ISA x dtype x head_dim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import Cache, attend, random_queries, relative_error
from cases.chosen_tokens import Chosen
from cases.pairwise import pairwise
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from offload.decode.attention import DecodeAttention
from offload.kv.format import KVFormat
from offload.kv.store import KVStore
from offload.policies import ExactTopK, Full

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = native.available_isas()
HEAD_DIMS = [16, 32, 64, 80, 96, 112, 128, 192, 256, 272, 576]
# Queries, and weights where there is VNNI, are rounded to 15 bits; outputs to the dtype.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def int8_cache(rng: np.random.Generator, **options: Any) -> Cache:
    return Cache.random(rng, kv_dtype="int8", **options)


def queries_of(cache: Cache, rng: np.random.Generator, group_size: int) -> torch.Tensor:
    store = cache.store
    return random_queries(rng, 1, store.num_kv_heads * group_size, store.head_dim, store.dtype)


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "group_size"),
    pairwise(ISAS, DTYPES, HEAD_DIMS, [1, 2, 3, 4, 5, 8, 128], together=2),
    ids=str,
)
def test_dense_matches_reference(isa, dtype, head_dim, group_size, pool):
    rng = new_rng()
    for kv_len in (1, 31, 33, 256, 257, 1027):
        cache = int8_cache(rng, kv_len=kv_len, head_dim=head_dim, dtype=dtype)
        queries = queries_of(cache, rng, group_size)
        attention = cache.attention(pool, group_size, isa=isa)
        out, lse = attend(attention, [cache.seq], [kv_len], queries)
        expected, expected_lse, _ = cache.expected(queries, kv_len)
        assert relative_error(out[0], expected) < TOLERANCE[dtype], kv_len
        np.testing.assert_allclose(lse[0], expected_lse, atol=5e-4)


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "group_size"),
    pairwise(ISAS, DTYPES, HEAD_DIMS, [1, 3, 4, 8], together=2),
    ids=str,
)
def test_chosen_tokens_match_reference(isa, dtype, head_dim, group_size, pool):
    rng = new_rng()
    kv_len = 1500
    cache = int8_cache(rng, kv_len=kv_len, head_dim=head_dim, dtype=dtype, page_tokens=64)
    for n in (1, 3, 32, 33, 400, kv_len - 1):
        selection = [
            np.append(np.sort(rng.choice(kv_len - 1, n - 1, replace=False)), kv_len - 1)
            for _ in range(2)
        ]
        policy = Chosen(budget_tokens=kv_len - 1, dense_layers=1, selection=selection)
        queries = queries_of(cache, rng, group_size)
        attention = cache.attention(pool, group_size, policy, isa)
        out, lse = attend(attention, [cache.seq], [kv_len], queries)
        expected, expected_lse, _ = cache.expected(queries, kv_len, selection)
        assert relative_error(out[0], expected) < TOLERANCE[dtype], n
        np.testing.assert_allclose(lse[0], expected_lse, atol=5e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_a_scan_of_keys_finds_the_largest(isa, pool):
    rng = new_rng()
    cache = int8_cache(rng, kv_len=2000, dtype=torch.bfloat16)
    policy = ExactTopK(budget_tokens=200, sink_tokens=4, recent_tokens=16, dense_layers=0)
    attention = cache.attention(pool, 1, policy, isa)
    queries = queries_of(cache, rng, 1)
    out, _ = attend(attention, [cache.seq], [2000], queries)
    chosen = [np.array(tokens) for tokens in attention.last_selection()]
    expected, _, _ = cache.expected(queries, 2000, chosen)
    assert relative_error(out[0], expected) < TOLERANCE[torch.bfloat16]
    scores = np.einsum("hd,htd->ht", queries.double().numpy().reshape(2, 64), cache.keys)
    for of_head, tokens in zip(scores, chosen, strict=True):
        best = 4 + np.argsort(-of_head[4:-16])[:180]
        assert len(np.intersect1d(best, tokens)) >= 178  # neighbours may change places


@pytest.mark.parametrize(("isa", "dtype"), combinations(ISAS, DTYPES))
def test_a_decode_step_writes_what_append_does(isa, dtype, pool):
    """The same bytes, also of rows that are zero, tiny, or huge."""
    rng = new_rng()
    for head_dim in HEAD_DIMS:
        store = KVStore(
            num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype="int8"
        )
        rows = torch.from_numpy(rng.standard_normal((6, 4, head_dim), dtype=np.float32))
        factors = torch.tensor([1.0, 0.0, 1e-7, 3e-4, 6e4, 300.0])
        rows = (rows.clamp(-1, 1) * factors[:, None, None]).to(dtype)
        native_seq, torch_seq = store.new_sequence(), store.new_sequence()
        attention = DecodeAttention(Full(), store, num_qo_heads=2, pool=pool, isa=isa)
        rope = torch.ones(1, head_dim, dtype=dtype), torch.zeros(1, head_dim, dtype=dtype)
        for token, row in enumerate(rows):
            store.reserve([native_seq, torch_seq], [1, 1])
            store.append(torch_seq, 0, row[None, :2], row[None, 2:])
            qkv = torch.cat([torch.zeros(2, head_dim, dtype=dtype), row]).view(1, -1)
            attention.rope_append(0, attention.begin_step([native_seq], [token + 1]), qkv, rope)
            store.commit([native_seq, torch_seq], [1, 1])
        pages = [next(store.page_views(seq, 0))[2] for seq in (native_seq, torch_seq)]
        assert torch.equal(*pages)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e7])
def test_what_int8_does_not_hold_is_reported(isa, bad, pool):
    """In the query, in a stored scale, and in what a decode step writes; 1e7 is beyond a scale."""
    rng = new_rng()
    queries = random_queries(rng, 1, 4, 64, torch.float32)
    message = "non-finite attention in layer 1, query row 0"
    for side in (0, 1):
        cache = int8_cache(rng, kv_len=300)
        attention = cache.attention(pool, 2, isa=isa)
        run, first, last = 0, 0, 0
        for first, last, pages in cache.store.page_views(cache.seq, 1):
            if first <= 130 < last:
                run = (130 - first) // 256
                scale = pages[run, side, 0, (130 - first) % 256, 64:].view(torch.float16)
                scale.fill_(float("nan"))
        with pytest.raises(RuntimeError, match=message):
            attend(attention, [cache.seq], [300], queries)
    cache = int8_cache(rng, kv_len=300)
    attention = cache.attention(pool, 2, isa=isa)
    rope = torch.ones(1, 64), torch.zeros(1, 64)
    for place in (4 * 64 + 3, 6 * 64 + 3):  # a key, a value
        cache.store.reserve([cache.seq], [1])
        qkv = torch.cat([queries, torch.zeros(1, 4 * 64)], 1)
        qkv[0, place] = bad
        step = attention.begin_step([cache.seq], [301])
        attention.rope_append(1, step, qkv, rope)
        with pytest.raises(RuntimeError, match=message):
            attend(attention, [cache.seq], [301], queries)
    if not np.isfinite(bad):
        queries[0, 7] = bad
        with pytest.raises(RuntimeError, match=message):
            attend(attention, [cache.seq], [300], queries)


def test_forks_and_truncation_keep_rows():
    rng = new_rng()
    cache = int8_cache(rng, kv_len=300, dtype=torch.bfloat16, page_tokens=64)
    store, seq = cache.store, cache.seq

    def rows_of(owner: int) -> torch.Tensor:
        runs = [pages.transpose(1, 3).flatten(0, 1) for *_, pages in store.page_views(owner, 1)]
        return torch.cat(runs)

    before = rows_of(seq).clone()
    fork = store.fork(seq)
    for owner in (seq, fork):  # copies on write
        store.reserve([owner], [1])
        for layer_idx in range(2):
            keys, values = (torch.randn(1, 2, 64).bfloat16() for _ in range(2))
            store.append(owner, layer_idx, keys, values)
        store.commit([owner], [1])
        assert torch.equal(rows_of(owner)[:300], before)
    store.truncate(fork, 130)
    assert torch.equal(rows_of(fork), before[:130])
    keys, _ = store.gather(fork, 1)
    assert torch.equal(keys.double(), torch.from_numpy(cache.keys[:, :130]).bfloat16().double())


def test_bytes_and_refusals():
    sizes = {"num_layers": 2, "num_kv_heads": 3, "dtype": torch.bfloat16}
    for head_dim in (64, 128):
        plain, int8 = (KVStore(**sizes, head_dim=head_dim, kv_dtype=x) for x in ("auto", "int8"))
        assert int8.token_bytes / plain.token_bytes == 66 / 128 <= 0.53
        assert int8.page_bytes * 2 == int8.token_bytes * 256
        of_token = KVFormat.of("int8", torch.bfloat16).token_bytes(2, 3, head_dim)
        assert of_token == int8.token_bytes
    store = KVStore(**sizes, head_dim=[64, 128], kv_dtype="int8")  # one page of all layers
    assert store.token_bytes == 2 * 3 * (66 + 132)
    seq = store.new_sequence()
    store.reserve([seq], [1])
    good = torch.ones(1, 3, 128, dtype=torch.bfloat16)
    store.append(seq, 1, good, -good)
    assert [x.unique().tolist() for x in store.gather(seq, 1, 0, 1)] == [[1.0], [-1.0]]
    with pytest.raises(
        ValueError, match=r"values in layer 1 of sequence 0 of up to 1e\+07 are bey"
    ):
        store.append(seq, 1, good, good * 1e7)
    with pytest.raises(ValueError, match="non-finite keys in layer 1 of sequence 0"):
        store.append(seq, 1, good * torch.nan, good)
    of_rows = KVFormat.of("int8", torch.bfloat16)
    assert [of_rows.row_bytes(n) for n in (16, 32, 80, 96)] == [34, 34, 100, 100]
    with pytest.raises(NotImplementedError, match="a multiple of 16, got 72"):
        KVStore(**sizes, head_dim=72, kv_dtype="int8")
    with pytest.raises(
        ValueError, match="unknown kv_dtype 'int4'; available: auto, bfloat16, float16"
    ):
        KVStore(**sizes, head_dim=64, kv_dtype="int4")
    with pytest.raises(NotImplementedError, match="its dtype is float32; give kv_dtype='auto'"):
        KVStore(**sizes | {"dtype": torch.float32}, head_dim=64, kv_dtype="bfloat16")
