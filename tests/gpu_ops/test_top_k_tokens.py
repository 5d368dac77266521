"""top_k_tokens: the importance against float64, the lists against a stable sort of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cases.seeded import new_rng

from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens

# Small enough for every path in a few hundred tokens: levels of groups, several tiles, segments.
SMALL = TopKLaunch(chunk_tokens=16, max_groups=32, segments=4, segment_tile=16, tile=16)
LAUNCHES = [SMALL, TopKLaunch()]
LOG2_E = math.log2(math.e)
TINY = 1.2e-38


class Case:
    """Operands for rows of these lengths; scores of tokens that do not exist are NaN.

    Args:
        levels: scores are small integers of so many values, whose weights no rounding can order
            otherwise; None: normally distributed.
    """

    def __init__(
        self,
        device: str,
        kv_lens: list[int],
        *,
        heads: tuple[int, ...] = (1,),
        num_kv_heads: int = 3,
        group_size: int = 2,
        shared: bool = False,
        sink_tokens: int = 4,
        recent_tokens: int = 6,
        budget_tokens: int = 40,
        ratio: float | None = None,
        levels: int | None = None,
        spread: float = 2.0,
        launch: TopKLaunch = SMALL,
        max_tokens: int | None = None,
    ) -> None:
        self.rng, self.device, self.kv_lens = new_rng(), device, kv_lens
        self.heads, self.group_size, self.shared = heads, group_size, shared
        self.sizes = {
            "sink_tokens": sink_tokens,
            "recent_tokens": recent_tokens,
            "budget_tokens": budget_tokens,
        }
        self.ratio, self.levels, self.spread = ratio, levels, spread
        n = len(kv_lens)
        max_tokens = max_tokens or -(-max(*kv_lens, 1) // 16) * 16
        self.scores = torch.full((n, len(heads), group_size, max_tokens), float("nan"))
        self.lse = torch.full((n, num_kv_heads * group_size), float("nan"))
        self.scores, self.lse = self.scores.to(device), self.lse.to(device)
        self.positions = torch.tensor(kv_lens, device=device) - 1
        self.head_list = torch.tensor(heads, dtype=torch.int32, device=device)
        lists = 1 if shared else len(heads)
        self.buffers = TopKBuffers.allocate(
            n * lists, max_tokens, budget_tokens, device, launch=launch
        )
        out = (n, 1 if shared else num_kv_heads)
        self.selection = torch.empty(*out, budget_tokens, dtype=torch.int32, device=device)
        self.counts = torch.empty(out, dtype=torch.int32, device=device)
        pin = {"pin_memory": True} if device == "cuda" else {}
        self.host = torch.empty(*self.selection.shape, dtype=torch.int32, **pin)
        self.host_counts = torch.empty(out, dtype=torch.int32, **pin)
        self.clear()
        for row in range(n):
            self.draw(row)

    def clear(self) -> None:
        """Mark everything that has to be written, scratch included."""
        if self.selection.is_cuda:
            torch.cuda.synchronize()  # a launch before this may still write to host memory
        for x in (self.selection, self.counts, self.host, self.host_counts):
            x.fill_(-7)
        for name in ("importance", "maxima", "candidates", "lengths"):
            getattr(self.buffers, name).fill_(0x3F000000)

    def draw(self, row: int) -> None:
        """New scores and lse of the row's tokens."""
        shape = (len(self.heads), self.group_size, self.kv_lens[row])
        if self.levels is None:
            scores = self.spread * self.rng.standard_normal(shape)
        else:
            # All query heads of a list alike, and powers of two: their sums are exact.
            scores = np.broadcast_to(self.rng.integers(0, self.levels, shape[2]), shape)
        self.scores[row, :, :, : shape[2]] = torch.from_numpy(scores.astype(np.float32))
        grouped = self.lse.view(len(self.kv_lens), -1, self.group_size)
        for i, head in enumerate(self.heads):
            exact = self.scores[row, i, :, : shape[2]].double() / LOG2_E
            grouped[row, head] = exact.logsumexp(-1).float() if shape[2] else -math.inf
            if self.levels is not None:
                grouped[row, head] = 0.0

    def set_lens(self, kv_lens: list[int]) -> None:
        """New lengths, with new scores; on the device they are in the same memory."""
        self.kv_lens = kv_lens
        self.positions.copy_(torch.tensor(kv_lens) - 1)
        self.scores.fill_(float("nan"))
        for row in range(len(kv_lens)):
            self.draw(row)

    def run(self) -> None:
        top_k_tokens(
            self.scores,
            self.lse,
            self.positions,
            self.head_list,
            **self.sizes,
            shared=self.shared,
            buffers=self.buffers,
            selection=self.selection,
            counts=self.counts,
            host_selection=self.host,
            host_counts=self.host_counts,
            ratio=self.ratio,
        )

    def importance(self, row: int, list_idx: int) -> npt.NDArray[Any]:
        """float64 weights of a list's tokens."""
        grouped = self.lse.view(len(self.kv_lens), -1, self.group_size)
        lse = grouped[row, list(self.heads)].double().cpu()
        scores = self.scores[row, :, :, : self.kv_lens[row]].double().cpu()
        weights = torch.exp2(scores - lse[..., None] * LOG2_E)
        return (weights.sum((0, 1)) if self.shared else weights[list_idx].sum(0)).numpy()

    def num_chosen(self, kv_len: int) -> int:
        sinks, recent, k = self.sizes.values()
        if self.ratio is not None:
            k = min(k, math.ceil(self.ratio * kv_len))
        return max(k - sinks - recent, 0)

    def expected(self, kv_len: int, importance: npt.NDArray[Any]) -> npt.NDArray[Any]:
        sinks, recent, budget = self.sizes.values()
        if kv_len <= budget:
            return np.arange(kv_len)
        last, k = kv_len - recent, self.num_chosen(kv_len)
        chosen = np.sort(np.argsort(-importance[sinks:last], kind="stable")[:k])
        return np.r_[np.arange(sinks), sinks + chosen, np.arange(last, kv_len)]

    def check(self) -> None:
        """What `run` wrote."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        lists = [0] if self.shared else list(self.heads)
        assert torch.equal(self.selection.cpu(), self.host)
        assert torch.equal(self.counts.cpu(), self.host_counts)
        others = [x for x in range(self.counts.shape[1]) if x not in lists]
        assert (self.host[:, others] == -7).all()
        assert (self.host_counts[:, others] == -7).all()
        for row, kv_len in enumerate(self.kv_lens):
            for i, target in enumerate(lists):
                count = int(self.host_counts[row, target])
                chosen = self.host[row, target].numpy()
                if kv_len == 0:
                    assert count == 0
                    continue
                exact = self.importance(row, i)
                assert_list(self, chosen[:count], exact, kv_len)
                assert (chosen[count:] == -7).all()
                ours = self.float32(row, i)
                if ours is not None and kv_len > self.sizes["budget_tokens"]:
                    sinks, recent, _ = self.sizes.values()
                    middle = slice(sinks, kv_len - recent)
                    # Kernels may take numbers below the normal ones for 0.
                    np.testing.assert_allclose(ours[middle], exact[middle], 4e-5, TINY)
                    np.testing.assert_array_equal(chosen[:count], self.expected(kv_len, ours))

    def float32(self, row: int, list_idx: int) -> npt.NDArray[Any] | None:
        """The kernels' importance; None: the reference ran, which keeps none."""
        lists = self.buffers.importance.shape[0] // len(self.kv_lens)
        bits = self.buffers.importance[row * lists + list_idx, : self.kv_lens[row]].cpu()
        return None if (bits == 0x3F000000).all() else bits.view(torch.float32).numpy()


def assert_list(case: Case, chosen: npt.NDArray[Any], exact: npt.NDArray[Any], kv_len: int) -> None:
    """Of the right tokens, but for those whose float64 importance is nearly the k-th."""
    expected = case.expected(kv_len, exact)
    assert len(chosen) == len(expected)
    assert (np.diff(chosen) > 0).all()
    if case.levels is not None:
        np.testing.assert_array_equal(chosen, expected)
    different = np.setxor1d(chosen, expected)
    if len(different):
        sinks, recent, _ = case.sizes.values()
        assert different.min() >= sinks
        assert different.max() < kv_len - recent
        k = case.num_chosen(kv_len)
        kth = np.sort(exact[sinks : kv_len - recent])[-k]
        np.testing.assert_allclose(exact[different], kth, 8e-5, TINY)


def check(device: str, kv_lens: list[int], **options: Any) -> None:
    case = Case(device, kv_lens, **options)
    case.run()
    case.check()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7])
def test_shapes(device: str, group_size: int, shared: bool, launch: TopKLaunch) -> None:
    check(device, [200, 0, 41], group_size=group_size, shared=shared, heads=(0, 2), launch=launch)


# Budget, one more and less; chunks and segments; as many groups as fit, and one more, by level.
@pytest.mark.parametrize(
    "kv_len", [1, 2, 39, 40, 41, 47, 48, 49, 63, 64, 65, 69, 70, 71, 102, 103, 134, 135, 262, 263]
)
def test_lengths(device: str, kv_len: int) -> None:
    check(device, [kv_len])


@pytest.mark.parametrize("kv_len", [41, 170])
@pytest.mark.parametrize("levels", [1, 2, 5])
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
@pytest.mark.parametrize("kv_len", [12, 100])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
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


@pytest.mark.cuda
def test_graph_replays_with_growing_lengths() -> None:
    sizes = {"sink_tokens": 16, "recent_tokens": 64, "budget_tokens": 2048}
    launch = TopKLaunch.default(2048)
    case = Case("cuda", [1, 1], **sizes, heads=(0, 2), launch=launch, max_tokens=40960)
    case.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for kv_lens in ([1, 0], [2048, 2047], [2049, 8193], [20000, 40960], [40959, 5]):
        case.set_lens(kv_lens)
        for x in (case.selection, case.counts, case.host, case.host_counts):
            x.fill_(-7)
        graph.replay()
        case.check()


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
