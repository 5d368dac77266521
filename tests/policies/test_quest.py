"""Quest: its bounds hold, its selection is that of a float64 reference, and its state follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.attention_cases import (
    GROUP_SIZE,
    TOLERANCE,
    attend,
    built,
    grow_by_one,
    make_case,
    relative_error,
)
from cases.seeded import new_rng
from cases.slowly import combinations

from offload.policies import Quest
from offload.policies.quest.key_bounds import split_query
from offload.policies.quest.policy import keep_budget
from offload.policies.registry import make_policy
from offload.selection.layer_state import State

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = {"budget_tokens": 96, "sink_tokens": 4, "recent_tokens": 20, "dense_layers": 0}
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # of scores


def bounds_of(arrays: State, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """float64 maxima and minima [num_kv_heads, pages with bounds, head_dim]."""
    bounds = arrays["bounds"]
    raw = torch.from_numpy(bounds.view(np.int16) if dtype == torch.bfloat16 else bounds)
    rows = raw.view(dtype).double().numpy().transpose(0, 2, 1, 3)
    rows = rows.reshape(*rows.shape[:2], -1)[:, : arrays["runs"][0]]
    head_dim = rows.shape[-1] // 2
    return rows[..., :head_dim], rows[..., head_dim:]


def reference_pages(query, keys, kv_len, policy) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [pages] in float64 of query [group, head_dim] on keys, and each page's tokens."""
    first, last, size = policy.sink_tokens, kv_len - policy.recent_tokens, policy.page_tokens
    num_pages = min((kv_len - first) // size, -(-(last - first) // size))
    pages = keys[first : first + num_pages * size].reshape(num_pages, size, -1)
    products = query[:, None, None] * np.stack([pages.max(1), pages.min(1)])[None]
    lengths = np.minimum(size, last - first - size * np.arange(num_pages))
    return products.max(1).sum((0, 2)), lengths


def check_selection(policy: Quest, tokens, query, keys, kv_len, rounding=1e-5) -> None:
    """The pages of largest bound, all but one whole; only near-ties may swap."""
    first, last, size = policy.sink_tokens, kv_len - policy.recent_tokens, policy.page_tokens
    budget = policy.budget_tokens - first - policy.recent_tokens
    bounds, lengths = reference_pages(query, keys, kv_len, policy)
    tokens = np.array(tokens)
    assert list(tokens[:first]) == list(range(first))
    assert list(tokens[len(tokens) - policy.recent_tokens :]) == list(range(last, kv_len))
    chosen = tokens[first : len(tokens) - policy.recent_tokens]
    paged_end = first + int(lengths.sum())
    loose = list(range(paged_end, last))
    assert list(chosen[len(chosen) - len(loose) :]) == loose
    chosen = chosen[: len(chosen) - len(loose)]
    assert len(chosen) == min(budget - len(loose), paged_end - first)
    numbers, counts = np.unique((chosen - first) // size, return_counts=True)
    cut = counts < lengths[numbers]
    assert cut.sum() <= 1
    for page, count in zip(numbers, counts, strict=True):
        begin = first + page * size
        assert list(chosen[chosen >= begin][:count]) == list(range(begin, begin + count))
    tolerance = rounding * np.abs(bounds).max()
    others = np.setdiff1d(np.arange(len(bounds)), numbers)
    if len(others):
        assert bounds[others].max() <= bounds[numbers].min() + tolerance
    if cut.any():
        assert bounds[numbers[cut]][0] <= bounds[numbers].min() + tolerance


def test_split_query_sums_the_signs_apart():
    query = new_rng().standard_normal((3, 8)).astype(np.float32)
    split = np.empty(16, np.float32)
    split_query(query.reshape(-1), 3, 8, split)
    np.testing.assert_allclose(split[:8], np.maximum(query, 0).sum(0), rtol=1e-6)
    np.testing.assert_allclose(split[8:], np.minimum(query, 0).sum(0), rtol=1e-6)
    query[1, 5] = np.nan
    split_query(query.reshape(-1), 3, 8, split)
    assert np.isnan(split).sum() == 1


@pytest.mark.parametrize(
    ("pages", "budget", "last", "expected"),
    [
        ([0, 2], 10, 100, [*range(2, 6), *range(8, 14)]),
        ([0, 2], 9, 100, [*range(2, 5), *range(8, 14)]),  # page 0 has the lower bound: it is cut
        ([0, 2], 7, 100, [2, *range(8, 14)]),
        ([0, 2], 6, 10, [*range(2, 6), 8, 9]),  # the recent window begins inside page 2
        ([1], 1, 100, [6]),
        ([], 3, 100, []),
    ],
)
def test_pages_are_cut_to_the_budget(pages, budget, last, expected):
    scores = np.array([1.0, 5.0, 3.0], np.float32)
    indices = np.full(10, -1, np.int32)
    starts = np.array([2, 6, 8, 14], np.int32)
    count = keep_budget(np.array(pages, np.int32), scores, starts, last, budget, indices)
    assert list(indices[:count]) == expected


@pytest.mark.parametrize(("dtype", "head_dim"), combinations(DTYPES, [16, 64, 96, 128, 192, 256]))
def test_no_key_beats_the_bound_of_its_page(dtype, head_dim):
    """In exact arithmetic, for single query heads and for the sum over a group."""
    rng = new_rng()
    keys = torch.from_numpy(4 * rng.standard_normal((2, 331, head_dim))).to(dtype)
    policy = Quest(**OPTIONS)
    maxima, minima = bounds_of(built(policy, keys), dtype)
    assert maxima.shape == (2, (331 - 4) // 16, head_dim)
    pages = keys.double().numpy()[:, 4 : 4 + 16 * maxima.shape[1]].reshape(2, -1, 16, head_dim)
    np.testing.assert_array_equal(maxima, pages.max(2))  # nothing is rounded
    np.testing.assert_array_equal(minima, pages.min(2))
    queries = rng.standard_normal((2, GROUP_SIZE, head_dim))
    above, below = np.maximum(queries, 0), np.minimum(queries, 0)
    bounds = np.einsum("hgd,hpd->hgp", above, maxima) + np.einsum("hgd,hpd->hgp", below, minima)
    scores = np.einsum("hgd,hpid->hgpi", queries, pages)
    slack = 1e-12 * np.abs(scores).max()
    assert (scores.max(3) <= bounds + slack).all()
    assert (scores.sum(1).max(2) <= bounds.sum(1) + slack).all()


# Wide heads take two products.
@pytest.mark.parametrize(("dtype", "head_dim"), combinations(DTYPES, [64, 128, 192, 256, 512]))
def test_selection_is_the_reference(head_dim, dtype, pool):
    policy = Quest(**OPTIONS)
    cache, queries = make_case(dtype, head_dim=head_dim)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    for row, kv_len in enumerate([97, 100, 116, 131, 132, 133, *[600] * 4]):
        query = queries[row : row + 1]
        out, _ = attend(attention, [cache.seq], [kv_len], query)
        heads = query.double().numpy().reshape(2, GROUP_SIZE, -1)
        selection = attention.last_selection()
        for head, tokens in enumerate(selection):
            check_selection(policy, tokens, heads[head], cache.keys[head], kv_len, ROUNDING[dtype])
        expected, _, _ = cache.expected(query, kv_len, [np.array(x) for x in selection])
        assert relative_error(out[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("recent_tokens", "page_tokens"), combinations([1, 5, 16, 31], [1, 7, 16, 40])
)
def test_pages_and_windows_of_any_size(recent_tokens, page_tokens, pool):
    """Tokens of an incomplete page that the recent window does not reach are attended, too."""
    policy = Quest(**{**OPTIONS, "recent_tokens": recent_tokens}, page_tokens=page_tokens)
    cache, queries = make_case(kv_len=500)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    for i, kv_len in enumerate((200, 203, 215, 500)):
        attend(attention, [cache.seq], [kv_len], queries[i : i + 1])
        heads = queries[i].double().numpy().reshape(2, GROUP_SIZE, -1)
        for head, tokens in enumerate(attention.last_selection()):
            check_selection(policy, tokens, heads[head], cache.keys[head], kv_len)


def test_a_budget_below_the_loose_tokens(pool):
    """The newest of them are kept."""
    policy = Quest(budget_tokens=12, sink_tokens=4, recent_tokens=5, dense_layers=0, page_tokens=64)
    cache, queries = make_case(kv_len=100)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    attend(attention, [cache.seq], [67], queries[:1])
    assert attention.last_selection() == [[0, 1, 2, 3, *range(59, 67)]] * 2


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_appended_bounds_are_those_of_a_new_build(dtype, head_dim, pool):
    policy = Quest(**OPTIONS)
    cache, queries = make_case(dtype, kv_len=150, head_dim=head_dim)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    rng = new_rng()
    for step in range(40):
        key, value = (torch.from_numpy(rng.standard_normal((2, head_dim))).to(dtype) for _ in "kv")
        grow_by_one(cache, attention, queries[step : step + 1], key, value)
        arrays = attention.states.arrays_of(cache.seq).layers[1]
        assert list(arrays["runs"]) == [(151 + step - 4) // 16] * 2
    keys, _ = cache.store.gather(cache.seq, 1)
    fresh = built(policy, keys)
    for ours, theirs in zip(bounds_of(arrays, dtype), bounds_of(fresh, dtype), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_truncated_pages_are_bounded_anew(pool):
    """After a cut into a page, other tokens complete it: the old bounds must not be used."""
    policy = Quest(**OPTIONS)
    cache, queries = make_case(kv_len=400)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    attend(attention, [cache.seq], [400], queries[:1])
    attention.states.truncate(cache.seq, 300)
    cache.store.truncate(cache.seq, 300)
    arrays = attention.states.arrays_of(cache.seq).layers[1]
    assert list(arrays["runs"]) == [18, 18]
    rng = new_rng()
    for step in range(60):
        key, value = (torch.from_numpy(9 * rng.standard_normal((2, 64))).float() for _ in "kv")
        tokens = grow_by_one(cache, attention, queries[step % 8 : step % 8 + 1], key, value)
    keys, _ = cache.store.gather(cache.seq, 1)
    heads = queries[59 % 8].double().numpy().reshape(2, GROUP_SIZE, -1)
    for head in range(2):
        check_selection(policy, tokens[head], heads[head], keys[head].double().numpy(), 360)


def test_bad_options():
    with pytest.raises(ValueError, match="page_tokens must be at least 1, got 0"):
        make_policy("quest", page_tokens=0)
    with pytest.raises(ValueError, match=r"page_tokens must be an int, got 2\.5"):
        make_policy("quest", page_tokens=2.5)
    with pytest.raises(ValueError, match="budget_tokens=60 cannot hold"):
        make_policy("quest", budget_tokens=60)
