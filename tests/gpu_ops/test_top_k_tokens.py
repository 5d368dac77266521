"""top_k_tokens: the importance against float64, the lists against a stable sort of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.slowly import combinations
from cases.top_k_cases import LAUNCHES, SMALL, Case, check

from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens


@pytest.mark.parametrize(
    ("launch", "shared", "group_size"), combinations(LAUNCHES, [False, True], [1, 3, 4, 7])
)
def test_shapes(device: str, group_size: int, shared: bool, launch: TopKLaunch) -> None:
    check(device, [200, 0, 41], group_size=group_size, shared=shared, heads=(0, 2), launch=launch)


# Budget, one more and less; chunks and segments; as many groups as fit, and one more, by level.
@pytest.mark.parametrize(
    "kv_len", [1, 2, 39, 40, 41, 47, 48, 49, 63, 64, 65, 69, 70, 71, 102, 103, 134, 135, 262, 263]
)
def test_lengths(device: str, kv_len: int) -> None:
    check(device, [kv_len])


@pytest.mark.parametrize(("kv_len", "levels"), combinations([41, 170], [1, 2, 5]))
def test_ties_go_to_the_first(device: str, kv_len: int, levels: int) -> None:
    check(device, [kv_len, kv_len], levels=levels, heads=(0, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_ties_with_other_sizes(device: str, shared: bool) -> None:
    check(device, [500, 77], levels=3, shared=shared, heads=(0, 1, 2), launch=TopKLaunch())


@pytest.mark.parametrize(
    ("sink_tokens", "recent_tokens", "budget_tokens"),
    [(0, 0, 1), (0, 0, 16), (0, 17, 20), (33, 0, 34), (20, 20, 40), (0, 1, 100), (1, 0, 127)],
)
def test_budgets(device: str, sink_tokens: int, recent_tokens: int, budget_tokens: int) -> None:
    sizes = {
        "sink_tokens": sink_tokens,
        "recent_tokens": recent_tokens,
        "budget_tokens": budget_tokens,
    }
    check(device, [budget_tokens + 1, 190], **sizes)
    check(device, [budget_tokens + 1, 190], **sizes, levels=2)


@pytest.mark.parametrize("ratio", [0.001, 0.05, 0.07, 0.1, 0.5, 1.0])
def test_ratio(device: str, ratio: float) -> None:
    check(device, [41, 100, 200, 300], ratio=ratio)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 40.0])
def test_flat_and_peaked_weights(device: str, spread: float) -> None:
    check(device, [300], spread=spread)


def test_weights_of_zero(device: str) -> None:
    case = Case(device, [300], levels=1)
    case.scores[:, :, :, :290] = -1000.0  # 2**-1000 is 0
    case.scores[:, :, :, 33:290:64] = 1.0
    case.run()
    case.check()


@pytest.mark.parametrize("first", [0, 100, 250])
def test_important_tokens_are_neighbours(device: str, first: int) -> None:
    case = Case(device, [300], spread=0.1)
    case.scores[:, :, :, first : first + 45] += 5.0
    case.run()
    case.check()


# In the slots of one group, the bound is as bad as it gets.
def test_important_tokens_share_groups(device: str) -> None:
    case = Case(device, [500], spread=0.1)
    case.scores[..., :500].view(-1, 500)[:, torch.arange(500) % 4 == 0] += 6.0
    case.run()
    case.check()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("kv_len", "bad"), combinations([12, 100], [float("nan"), float("inf"), float("-inf")])
)
def test_a_lse_that_is_not_finite(device: str, kv_len: int, bad: float) -> None:
    case = Case(device, [kv_len, kv_len], heads=(0, 2))
    case.lse[0, 5] = bad  # the second query head of KV head 2
    case.run()
    assert case.counts[:, [0, 2]].tolist() == [[min(kv_len, 40), -1], [min(kv_len, 40)] * 2]
    assert case.host_counts[0, 2] == -1


@pytest.mark.parametrize("sizes", [(4, 6, 40), (20, 20, 40)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite(device: str, bad: float, sizes: tuple[int, int, int]) -> None:
    sinks, recent, budget = sizes
    case = Case(device, [100], sink_tokens=sinks, recent_tokens=recent, budget_tokens=budget)
    case.scores[0, 0, 1, 70] = bad
    case.run()
    assert case.counts[0, 1] == -1
    case.scores[0, 0, 1, 70] = float("-inf")  # a weight of 0
    case.run()
    assert case.counts[0, 1] == 40


def test_scratch_is_used_again(device: str) -> None:
    case = Case(device, [300, 41])
    for kv_lens in ([300, 41], [60, 290], [0, 100], [301, 40]):
        case.set_lens(kv_lens)
        for x in (case.selection, case.counts, case.host, case.host_counts):
            x.fill_(-7)
        case.run()
        case.check()


def test_without_host_memory(device: str) -> None:
    case = Case(device, [100])
    case.run()
    expected = case.selection.clone(), case.counts.clone()
    case.clear()
    top_k_tokens(
        case.scores,
        case.lse,
        case.positions,
        case.head_list,
        **case.sizes,
        shared=False,
        buffers=case.buffers,
        selection=case.selection,
        counts=case.counts,
    )
    assert torch.equal(case.selection, expected[0])
    assert torch.equal(case.counts, expected[1])
    assert (case.host == -7).all()


@pytest.mark.cuda
@pytest.mark.parametrize("levels", [None, 1, 3, 40])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kv_lens", [[131072], [131071, 4096, 0, 20011, 2048, 2049]])
def test_real_sizes(kv_lens: list[int], shared: bool, levels: int | None) -> None:
    sizes = {"sink_tokens": 16, "recent_tokens": 64, "budget_tokens": 2048}
    launch = TopKLaunch.default(2048)
    heads = {"heads": tuple(range(8)), "num_kv_heads": 8, "group_size": 4}
    check("cuda", kv_lens, **sizes, **heads, shared=shared, levels=levels, launch=launch)


@pytest.mark.cuda
@pytest.mark.parametrize("budget_tokens", [256, 1024, 4096, 8192, 30000])
def test_real_budgets(budget_tokens: int) -> None:
    check(
        "cuda",
        [200000],
        budget_tokens=budget_tokens,
        launch=TopKLaunch.default(budget_tokens),
    )


def test_launches() -> None:
    assert TopKLaunch.default(2048) == TopKLaunch()
    # A small budget has few groups; a context of a million tokens needs more of them.
    assert TopKLaunch.default(256).max_tokens == 2**19
    for max_tokens in (2**19 + 16, 2**20, 2**22):
        assert TopKLaunch.default(256, max_tokens).max_tokens >= max_tokens
    assert TopKBuffers.allocate(1, 2**20, 256, "cpu").maxima.shape == (1, 4096)
    assert TopKLaunch().max_tokens == 8192 * 256
    with pytest.raises(ValueError, match="tile must be a power of two, got 48"):
        TopKLaunch(tile=48)
    with pytest.raises(ValueError, match="at most 16384, got 4096 and 32768"):
        TopKLaunch(tile=32768)
    with pytest.raises(ValueError, match=r"chunk_tokens must be 16 to max_groups \(32\), got 64"):
        TopKLaunch(chunk_tokens=64, max_groups=32)
    with pytest.raises(ValueError, match="max_tokens must be at most 512, got 528"):
        TopKBuffers.allocate(1, 528, 40, "cpu", launch=SMALL)


def test_wrong_operands() -> None:
    case = Case("cpu", [100], heads=(0, 1))

    def refuses(message: str, **changed: Any) -> None:
        options = {
            "scores": case.scores,
            "lse": case.lse,
            "positions": case.positions,
            "heads": case.head_list,
            **case.sizes,
            "shared": False,
            "buffers": case.buffers,
            "selection": case.selection,
            "counts": case.counts,
        }
        with pytest.raises(ValueError, match=message):
            top_k_tokens(**options | changed)

    refuses("within the budget of 40, got 30 and 11", sink_tokens=30, recent_tokens=11)
    refuses(r"ratio must be in \(0, 1\], got 0", ratio=0.0)
    refuses(r"selection must be \[1, 1, 40\]", shared=True)
    refuses("given both, or neither", host_selection=case.host)
    refuses(r"host_counts must be \[1, 3\]", host_selection=case.host, host_counts=case.counts[:0])
    refuses("at least 2 KV heads of 2, got 2", lse=case.lse[:, :2])
    refuses("a multiple of 16, got 104", scores=case.scores[..., :104].contiguous())
    small = TopKBuffers.allocate(1, 112, 40, "cpu")
    refuses("for 2 lists of 112 tokens, got 1 of 112", buffers=small)
