"""Operands of top_k_tokens: the importance against float64, lists against a stable sort of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
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
        shift: of these scores: weights are multiples of 2**shift.
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
        top_p: float | None = None,
        threshold: float | None = None,
        levels: int | None = None,
        shift: int = 0,
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
        self.ratio, self.levels, self.shift, self.spread = ratio, levels, shift, spread
        self.rule = {"ratio": ratio, "top_p": top_p, "threshold": threshold}
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
            drawn = self.rng.integers(0, self.levels, shape[2]) + self.shift
            scores = np.broadcast_to(drawn, shape)
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
            **self.rule,
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
    """The right tokens are chosen, but for those whose float64 importance is nearly the k-th."""
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
