"""Rules that end a list before its budget: against float64, and against what the CPU selects."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cases.slowly import combinations, slow_but
from cases.top_k_cases import LAUNCHES, SMALL, Case

from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_lists import TopKLists
from gpu_ops.top_k_tokens import bits_at_most
from offload.policies.lychee_decode.policy import enough_for_share

RULES = [{"top_p": 0.5}, {"threshold": 0.01}, {"ratio": 0.1}]
LARGE = {"sink_tokens": 4, "recent_tokens": 6, "budget_tokens": 150}


def heads_of_list(case: Case) -> int:
    return case.group_size * (len(case.heads) if case.shared else 1)


def in_order(case: Case, importance: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As many tokens as the budget has room for, heaviest first, of equal ones the first."""
    sinks, recent, budget = case.sizes.values()
    between = importance[sinks : len(importance) - recent]
    return sinks + np.argsort(-between, kind="stable")[: budget - sinks - recent]


def num_kept(case: Case, importance: npt.NDArray[Any], slack: float = 0.0) -> int:
    """Tokens that float64 keeps, with a slack of so much more than the rule wants."""
    weights = importance.astype(np.float64)
    order, count = in_order(case, importance), heads_of_list(case)
    if case.rule["threshold"] is not None:
        return int((weights[order] > case.rule["threshold"] * count * (1 + slack)).sum())
    sinks, recent, _ = case.sizes.values()
    missing = case.rule["top_p"] * count * (1 + slack)
    missing -= weights[:sinks].sum() + weights[len(weights) - recent :].sum()
    before = np.r_[0.0, np.cumsum(weights[order])][: len(order)]
    return int((before < missing).sum())


def check(case: Case) -> list[int]:
    """Lists are the first of the order, as many as the rule says; returns how many were chosen."""
    case.run()
    if case.device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(case.counts.cpu(), case.host_counts)
    assert torch.equal(case.selection.cpu(), case.host)
    sinks, recent, budget = case.sizes.values()
    chosen_tokens = []
    for row, kv_len in enumerate(case.kv_lens):
        for i, target in enumerate([0] if case.shared else case.heads):
            count = int(case.host_counts[row, target])
            tokens = case.host[row, target].numpy()
            assert (tokens[max(count, 0) :] == -7).all()
            if kv_len <= budget:
                np.testing.assert_array_equal(tokens[:count], np.arange(kv_len))
                continue
            exact, ours = case.importance(row, i), case.float32(row, i)
            ends = np.r_[:sinks, kv_len - recent : kv_len]
            by = exact if ours is None else np.where(np.isin(np.arange(kv_len), ends), exact, ours)
            kept = count - sinks - recent
            slack = 0.0 if case.levels is not None else 2e-5
            # More is wanted for a share, and less is above a higher threshold.
            least, most = sorted(num_kept(case, exact, x) for x in (-slack, slack))
            assert least <= kept <= most
            if ours is not None or case.levels is not None:
                expected = np.sort(np.r_[ends, in_order(case, by)[:kept]])
                np.testing.assert_array_equal(tokens[:count], expected)
            chosen_tokens.append(kept)
    return chosen_tokens


@pytest.mark.parametrize(
    ("launch", "shared", "rule"),
    combinations(LAUNCHES, [False, True], [{"top_p": 0.4}, {"threshold": 0.005}]),
)
def test_shapes(device: str, rule: dict[str, float], shared: bool, launch: TopKLaunch) -> None:
    options = {"heads": (0, 2), "shared": shared, "launch": launch, "group_size": 3}
    kept = check(Case(device, [300, 0, 151, 90], **rule, **options, **LARGE))
    assert all(0 < count < 140 for count in kept)


@pytest.mark.parametrize(
    ("top_p", "spread"), combinations([0.05, 0.5, 0.999, 1.0], [0.0, 2.0, 8.0])
)
def test_top_p(device: str, spread: float, top_p: float) -> None:
    check(Case(device, [151, 400], top_p=top_p, spread=spread, **LARGE))


@pytest.mark.parametrize(
    ("threshold", "spread"), combinations([1e-30, 1e-3, 0.02, 1.0], [0.0, 2.0])
)
def test_threshold(device: str, spread: float, threshold: float) -> None:
    check(Case(device, [151, 400], threshold=threshold, spread=spread, **LARGE))


# Weights are powers of two: every sum is exact, and half of the tokens are equal or more.
@pytest.mark.parametrize("levels", slow_but([1, 2, 5], 2))
@pytest.mark.parametrize("top_p", [2**-7, 0.1, 0.25, 0.3, 1.0])
def test_top_p_takes_the_first_of_equal_ones(device: str, top_p: float, levels: int) -> None:
    """As the CPU does."""
    case = Case(device, [60, 200], top_p=top_p, levels=levels, shift=-7, budget_tokens=59)
    for row, kept in enumerate(check(case)):
        importance = case.importance(row, 0).astype(np.float32)
        weights = importance.astype(np.float64)
        chosen = np.sort(in_order(case, importance)).astype(np.int32) - 4
        missing = top_p * case.group_size - weights[:4].sum() - weights[-6:].sum()
        assert kept == enough_for_share(importance, chosen, 4, missing)
        np.testing.assert_array_equal(case.host[row, 1, 4 : 4 + kept].numpy() - 4, chosen[:kept])


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_share_that_is_reached_exactly(device: str, more: int) -> None:
    """By all tokens of the larger of two weights, and by one more or less."""
    case = Case(device, [200], top_p=1.0, levels=2, shift=-8, **LARGE)
    weights = case.importance(0, 0)
    ends, between = np.r_[weights[:4], weights[-6:]], np.sort(weights[4:-6])[::-1]
    wanted = int((between == between[0]).sum()) + more
    case.rule["top_p"] = float(ends.sum() + between[:wanted].sum()) / case.group_size
    assert check(case) == [wanted]


@pytest.mark.parametrize("threshold", [2**-8, 2**-7, 2**-6, 2**-6 * (1 - 1e-12), 0.02])
def test_a_weight_that_equals_the_threshold_is_not_above_it(device: str, threshold: float) -> None:
    case = Case(device, [60, 200], threshold=threshold, levels=3, shift=-7, budget_tokens=59)
    for row, kept in enumerate(check(case)):
        kv_len = case.kv_lens[row]
        weights = case.importance(row, 0)[4 : kv_len - 6] / case.group_size
        assert kept == min(49, int((weights > threshold).sum()))


@pytest.mark.parametrize(
    ("rule", "sink_tokens", "recent_tokens", "budget_tokens"),
    combinations(RULES[:2], [(0, 0, 1), (33, 0, 34), (20, 20, 40), (20, 20, 90), (0, 1, 100)]),
)
def test_budgets(
    device: str, sink_tokens: int, recent_tokens: int, budget_tokens: int, rule: dict[str, float]
) -> None:
    sizes = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    kv_lens = [budget_tokens + 1, 190]
    check(Case(device, kv_lens, **sizes, budget_tokens=budget_tokens, **rule))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("rule", "bad", "place"),
    combinations(RULES, [(float("nan"), 70), (float("inf"), 1), (float("nan"), 97)]),
)
def test_a_score_that_is_not_finite(
    device: str, place: int, bad: float, rule: dict[str, float]
) -> None:
    """No list of a head that has one; as retrieval_attention leaves it, its lse is not finite."""
    case = Case(device, [100, 100], heads=(0, 2), **rule)
    before = case.scores.clone()
    case.run()
    expected = case.counts.tolist()
    assert min(expected[0][0], expected[0][2]) >= 10
    case.scores[0, 1, 0, place] = bad
    # Alone, too, where the score counts.
    if place == 70 or "top_p" in rule:
        case.run()
        assert case.counts.tolist() == [[expected[0][0], -7, -1], expected[1]]
    case.lse[0, 4] = bad
    case.run()
    assert case.counts.tolist() == [[expected[0][0], -7, -1], expected[1]]
    case.scores.copy_(before)
    case.scores[1, 0, 1, 30:60] = float("-inf")  # weights of 0
    case.run()
    assert case.counts[1, 0] >= 10


@pytest.mark.parametrize("rule", [{"top_p": 0.8}, {"threshold": 0.005}], ids=str)
def test_scratch_is_used_again(device: str, rule: dict[str, float]) -> None:
    case = Case(device, [300, 151], **rule, **LARGE)
    for kv_lens in ([300, 151], [160, 290], [0, 200], [300, 150]):
        case.set_lens(kv_lens)
        case.clear()
        check(case)


@pytest.mark.cuda
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget_tokens", [2048, 16384])
@pytest.mark.parametrize(
    "rule",
    [{"top_p": 0.5}, {"top_p": 0.99}, {"threshold": 1e-5}, {"threshold": 1e-4}],
    ids=str,
)
def test_real_sizes(rule: dict[str, float], budget_tokens: int, shared: bool) -> None:
    sizes = {"sink_tokens": 16, "recent_tokens": 64, "budget_tokens": budget_tokens}
    heads = {"heads": tuple(range(8)), "num_kv_heads": 8, "group_size": 4}
    launch = TopKLaunch.default(budget_tokens)
    check(Case("cuda", [131072, 20011, 0], **sizes, **heads, **rule, shared=shared, launch=launch))


@pytest.mark.cuda
@pytest.mark.parametrize("rule", [{"top_p": 0.9}, {"threshold": 3e-4}], ids=str)
def test_graph_replays_with_growing_lengths(rule: dict[str, float]) -> None:
    """One capture serves lists of any length."""
    sizes = {"sink_tokens": 16, "recent_tokens": 64, "budget_tokens": 2048}
    launch = TopKLaunch.default(2048)
    case = Case("cuda", [1, 1], **sizes, heads=(0, 2), launch=launch, max_tokens=40960, **rule)
    case.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    case.run = graph.replay  # type: ignore[method-assign]
    for kv_lens in ([1, 0], [2048, 2047], [2049, 8193], [20000, 40960], [40959, 5]):
        case.set_lens(kv_lens)
        case.clear()
        check(case)


def test_bounds_are_the_next_float32_below() -> None:
    for x in (1.0, 0.1, 0.3, 1e-30, 1 / 3, 7 * 0.01):
        below = np.uint32(bits_at_most(x)).view(np.float32)
        assert float(below) <= x < float(np.nextafter(below, np.float32(2)))
    assert bits_at_most(1e-60) == 0


def test_numbers_out_of_range_and_two_rules() -> None:
    selection = torch.zeros(1, 1, 40, dtype=torch.int32)
    counts = torch.zeros(1, 1, dtype=torch.int32)
    buffers = TopKBuffers.allocate(1, 112, 40, "cpu", launch=SMALL)

    def refuses(message: str, **rule: float) -> None:
        lists = TopKLists(4, 6, 40, selection, counts, **rule)
        with pytest.raises(ValueError, match=message):
            lists.check(1, 1, 1, 112, buffers, torch.device("cpu"))

    refuses(r"top_p must be in \(0, 1\], got 1\.5", top_p=1.5)
    refuses(r"threshold must be in \(0, 1\], got 0\.0", threshold=0.0)
    refuses("only one rule can end a list, got ratio and top_p", ratio=0.1, top_p=0.5)
