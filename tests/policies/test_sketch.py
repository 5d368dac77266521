"""Sketch: its codes are those of a float64 reference, and what they find; its state follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.attention_cases import GROUP_SIZE, Cache, attend, built, grow_by_one, make_case
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops.codes import CODE_BLOCK
from cpu_ops.worker_pool import WorkerPool
from offload.policies import Sketch
from offload.policies.registry import make_policy
from offload.policies.sketch.codes import LEVELS, encode_rows, rotate
from offload.selection.layer_state import State

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = {"budget_tokens": 96, "sink_tokens": 4, "recent_tokens": 20, "dense_layers": 0}
HEAD_DIMS = [16, 48, 64, 80, 96, 128, 192, 256]


def rotation(head_dim: int) -> np.ndarray:
    """float64 [head_dim, head_dim]: x @ rotation is what `rotate` makes of x."""
    rows = np.eye(head_dim, dtype=np.float32)
    for row in rows:
        rotate(row)
    return rows.astype(np.float64)


def decoded(arrays: State, tokens: int) -> np.ndarray:
    """float64 [num_kv_heads, tokens, head_dim]: what the codes stand for, rotated back."""
    codes, levels = arrays["codes"], arrays["levels"].astype(np.float64)
    bits = len(levels) // 2
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = codes[:, :, :, None] >> shifts[None, None, None, :, None] & (1 << bits) - 1
    num_heads, blocks = codes.shape[:2]
    rows = values.reshape(num_heads, blocks, -1, CODE_BLOCK).transpose(0, 1, 3, 2)
    rows = levels[rows.reshape(num_heads, blocks * CODE_BLOCK, -1)] * arrays["scales"][..., None]
    return (rows @ rotation(rows.shape[-1]).T)[:, :tokens]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_keeps_products_and_spreads_what_is_in_one_dimension(head_dim):
    matrix = rotation(head_dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    width = head_dim & -head_dim
    np.testing.assert_allclose(np.abs(matrix[matrix != 0]), width**-0.5, rtol=1e-5)
    assert ((matrix != 0).sum(0) == width).all()


@pytest.mark.parametrize(("bits", "dtype", "head_dim"), combinations([1, 2], DTYPES, HEAD_DIMS))
def test_codes_are_the_nearest_levels(bits, dtype, head_dim, pool):
    """They code keys less their mean; the product of such a key and its own code is exact."""
    rng = new_rng()
    keys = torch.from_numpy(3 * rng.standard_normal((2, 331, head_dim))).to(dtype)
    arrays = built(Sketch(**OPTIONS, bits=bits), keys, pool=pool)
    assert (arrays["encoded"] == 331).all()
    means = keys.double().mean(1, keepdim=True).numpy()
    np.testing.assert_allclose(arrays["mean"][:, None], means, rtol=1e-4, atol=1e-5)
    wide = keys.double().numpy() - arrays["mean"][:, None]
    sketches = decoded(arrays, 331)
    np.testing.assert_allclose((wide * sketches).sum(2), (wide * wide).sum(2), rtol=1e-4)
    rotated, levels = wide @ rotation(head_dim), LEVELS[bits].astype(np.float64)
    sigma = np.sqrt((rotated**2).mean(2, keepdims=True))
    bounds = [0.0] if bits == 1 else [-0.9816, 0.0, 0.9816]
    expected = np.searchsorted(bounds, rotated / sigma)
    ours = sketches @ rotation(head_dim)
    scales = arrays["scales"][:, :331, None].astype(np.float64)
    differ = np.abs(ours - scales * levels[expected]) > 1e-4 * np.abs(ours).max()
    assert differ.mean() < 1e-3  # roundings at a bound
    similarity = (wide * sketches).sum(2) / np.linalg.norm(sketches, axis=2)
    similarity /= np.linalg.norm(wide, axis=2)
    assert similarity.mean() == pytest.approx({1: 0.80, 2: 0.94}[bits], abs=0.03)


def test_equal_keys_have_no_codes(pool):
    """What they have is their mean."""
    arrays = built(Sketch(**OPTIONS), torch.ones(1, 200, 64), pool=pool)
    assert not arrays["scales"].any()


def scores_of(arrays: State, query: np.ndarray, tokens: int) -> np.ndarray:
    """[num_kv_heads, tokens]: the largest over the group, of query [heads, group, head_dim]."""
    keys = decoded(arrays, tokens) + arrays["mean"][:, None]
    products = np.einsum("hgd,htd->hgt", query, keys)
    return products.max(1) * query.shape[-1] ** -0.5


def check_selection(policy: Sketch, arrays: State, selection, query, kv_len, slack) -> None:
    """The tokens of largest score, for a policy without further candidates."""
    first, last = policy.sink_tokens, kv_len - policy.recent_tokens
    chosen_tokens = policy.budget_tokens - first - policy.recent_tokens
    scores = scores_of(arrays, query, kv_len)
    for head, tokens in enumerate(selection):
        tokens = np.array(tokens)
        assert list(tokens[:first]) == list(range(first))
        assert list(tokens[-policy.recent_tokens :]) == list(range(last, kv_len))
        chosen = tokens[first : -policy.recent_tokens]
        assert len(chosen) == chosen_tokens
        others = np.setdiff1d(np.arange(first, last), chosen)
        assert scores[head, others].max() <= scores[head, chosen].min() + slack


@pytest.mark.parametrize(("bits", "dtype", "head_dim"), combinations([1, 2], DTYPES, [48, 64, 128]))
def test_selection_is_the_reference(bits, dtype, head_dim, pool):
    policy = Sketch(**OPTIONS, bits=bits, candidate_ratio=1.0)
    cache, queries = make_case(dtype, head_dim=head_dim)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    for row, kv_len in enumerate((97, 128, 129, 383, 384, 600)):
        query = queries[row : row + 1]
        attend(attention, [cache.seq], [kv_len], query)
        arrays = attention.states.arrays_of(cache.seq).layers[1]
        heads = query.double().numpy().reshape(2, GROUP_SIZE, -1)
        # Queries count in 127ths of the widest range of a nibble.
        check_selection(policy, arrays, attention.last_selection(), heads, kv_len, 0.2)


def test_of_more_candidates_the_heaviest_are_kept(pool):
    """With all tokens as candidates it is exact top-k."""
    cache, queries = make_case()
    selections = []
    for policy in (Sketch(**OPTIONS, candidate_ratio=10), make_policy("exact_topk", **OPTIONS)):
        attention = cache.attention(pool, GROUP_SIZE, policy)
        attend(attention, [cache.seq], [600], queries[:1])
        selections.append(attention.last_selection())
    assert selections[0] == selections[1]


@pytest.mark.parametrize("name", ["sketch", pytest.param("union", marks=pytest.mark.slow)])
def test_workers_share_what_is_long(name, pool):
    """They score a head's codes together where there are many, with the same result."""
    options = OPTIONS | {"bits": 1, "candidate_ratio": 1.0}
    if name == "union":
        options |= {"first": "sketch", "second": "lychee_cluster"}
    policy = make_policy(name, **options)
    cache, queries = make_case(kv_len=9001, head_dim=16)
    found = []
    alone = WorkerPool(1)
    for workers in (alone, pool):
        attention = cache.attention(workers, GROUP_SIZE, policy)
        out, _ = attend(attention, [cache.seq], [9001], queries[:1])
        found.append((attention.last_selection(), out))
    alone.close()
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


def check_codes(policy: Sketch, cache: Cache, arrays: State, seq: int, pool: WorkerPool) -> None:
    """They are those of a new build with the same mean, bit for bit."""
    keys, _ = cache.store.gather(seq, 1)
    kv_len = keys.shape[1]
    fresh = built(policy, keys, pool=pool)
    for head in range(len(keys)):
        rows, codes = keys[head].float().numpy(), fresh["codes"][head].reshape(-1)
        mean, levels, scales = arrays["mean"][head], fresh["levels"], fresh["scales"][head]
        encode_rows(rows.copy(), mean, policy.bits, levels, codes, scales, 0)
    assert (arrays["encoded"] == kv_len).all()
    ours, theirs = (x["codes"].transpose(0, 1, 3, 2) for x in (arrays, fresh))
    blocks, left = divmod(kv_len, CODE_BLOCK)
    np.testing.assert_array_equal(ours[:, :blocks], theirs[:, :blocks])
    np.testing.assert_array_equal(ours[:, blocks, :left], theirs[:, blocks, :left])
    np.testing.assert_array_equal(arrays["scales"][:, :kv_len], fresh["scales"][:, :kv_len])


@pytest.mark.parametrize(
    ("bits", "dtype", "head_dim"),
    [(1, torch.float32, 48), (1, torch.bfloat16, 128), (2, torch.float16, 64)],
)
def test_appended_cut_and_forked_codes_are_those_of_a_new_build(bits, dtype, head_dim, pool):
    policy = Sketch(**OPTIONS, bits=bits)
    cache, queries = make_case(dtype, kv_len=150, head_dim=head_dim)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    rng = new_rng()

    def step(row: int, seq: int) -> None:
        key, value = (torch.from_numpy(rng.standard_normal((2, head_dim))).to(dtype) for _ in "kv")
        grow_by_one(cache, attention, queries[row : row + 1], key, value, seq)
        check_codes(policy, cache, attention.states.arrays_of(seq).layers[1], seq, pool)

    for row in range(50):
        step(row, cache.seq)
    attention.states.truncate(cache.seq, 170)
    cache.store.truncate(cache.seq, 170)
    step(50, cache.seq)
    child = cache.store.fork(cache.seq)
    attention.states.fork(cache.seq, child)
    for row in range(51, 55):
        step(row, cache.seq)
        step(row, child)


@pytest.mark.parametrize("bits", [1, 2])
def test_codes_take_little(bits):
    """Compared with bf16 keys and values of 128 dimensions, at 128K tokens."""
    from offload.selection.layer_state import StateShape

    num_bytes = Sketch(bits=bits).state.num_bytes(StateShape(32, 8, 128, 2, 131072))
    share = num_bytes / (131072 * 8 * 512)
    assert share == pytest.approx({1: 20 / 512, 2: 36 / 512}[bits], rel=0.02)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_key_that_is_not_finite_has_no_scale(value):
    """Such a token is attended to (tests/cpu_ops/test_codes.py); squares may overflow, too."""
    rows = new_rng().standard_normal((3, 64)).astype(np.float32)
    rows[1, 5] = value
    codes, scales = np.zeros(8 * CODE_BLOCK, np.uint8), np.zeros(CODE_BLOCK, np.float32)
    encode_rows(rows, np.zeros(64, np.float32), 1, LEVELS[1], codes, scales, 0)
    assert list(np.isnan(scales[:3])) == [False, True, False]


def test_bad_options():
    for bits in (0, 3, True, 1.0):
        with pytest.raises(ValueError, match=f"bits must be 1 or 2, got {bits}"):
            make_policy("sketch", bits=bits)
    with pytest.raises(ValueError, match=r"candidate_ratio must be in \[1, 64\], got 0\.5"):
        make_policy("sketch", candidate_ratio=0.5)
