"""top_k_codes against float64, against an exact top-k of its own scores, and against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cases.operands import quiet_numpy
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops.codes import score_codes
from gpu_ops.code_scores import CodeLaunch, CodeQuery, code_page_bytes
from gpu_ops.layout import allocate
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_codes import key_of, top_k_codes
from gpu_ops.top_k_lists import TopKLists
from offload.policies.sketch.codes import LEVELS, rotation
from offload.policies.sketch.codes_on_device import encode_keys, mean_keys

NUM_KV_HEADS = 3
SMALL = TopKLaunch(64, 64, 4, 16, 64)
SMALL_CODES = CodeLaunch(32, segment_tile=16, found_tile=16)
PAGE_TOKENS = 32


class Case:
    """Rows of keys, their codes in pages in shuffled order, and a query.

    Args:
        kv_lens: 0 for an inactive row.
        launch: of the top-k; None: this and that of the codes are as for real sizes.
    """

    def __init__(
        self,
        device: str,
        kv_lens: list[int],
        *,
        bits: int = 2,
        head_dim: int = 64,
        group_size: int = 4,
        heads: tuple[int, ...] = (0, 2),
        num_kv_heads: int = NUM_KV_HEADS,
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int, int] = (4, 6, 40),
        page_tokens: int = PAGE_TOKENS,
        launch: TopKLaunch | None = SMALL,
    ) -> None:
        rng = new_rng()
        self.device, self.kv_lens, self.bits, self.heads = device, kv_lens, bits, heads
        self.page_tokens, self.group_size, self.head_dim = page_tokens, group_size, head_dim
        n, num_heads = len(kv_lens), len(heads)
        self.sm_scale = head_dim**-0.5
        self.num_qo_heads = num_kv_heads * group_size
        query = torch.from_numpy(rng.standard_normal((n, self.num_qo_heads * head_dim)))
        self.query = (2 * query).to(device=device, dtype=dtype)
        self.rotation = torch.from_numpy(rotation(head_dim)).to(device)
        self.means = torch.zeros(n, num_heads, head_dim, device=device)
        width = head_dim * bits // 8
        counts = [-(-kv_len // page_tokens) for kv_len in kv_lens]
        num_bytes = code_page_bytes(num_heads, page_tokens, head_dim, bits)
        pages = torch.full((sum(counts), num_bytes), 0xFF, dtype=torch.uint8)  # scales: NaN
        self.pages, order = pages.to(device), rng.permutation(sum(counts)).tolist()
        self.table = torch.zeros(n, max(*counts, 1), dtype=torch.int64)
        self.codes, self.scales = [], []
        for row, kv_len in enumerate(kv_lens):
            keys = torch.from_numpy(rng.standard_normal((num_heads, kv_len, head_dim)) + 0.5)
            codes, scales = self._encoded(row, keys.float(), kv_len)
            for page_idx in range(counts[row]):
                at = order.pop()
                self.table[row, page_idx] = self.pages.data_ptr() + at * num_bytes
                tokens = slice(page_idx * page_tokens, (page_idx + 1) * page_tokens)
                for i in range(num_heads):
                    of_head = pages[at, i * page_tokens * width : (i + 1) * page_tokens * width]
                    of_head = of_head.view(page_tokens, width)
                    of_head[: len(codes[i, tokens])] = codes[i, tokens]
                    of_head = pages[at, num_heads * page_tokens * width :].view(torch.float32)
                    of_head = of_head.view(num_heads, page_tokens)[i]
                    of_head[: len(scales[i, tokens])] = scales[i, tokens]
        self.pages.copy_(pages)
        self.table = self.table.to(device)
        self.positions = torch.tensor(kv_lens, device=device) - 1
        self.head_list = torch.tensor(heads, dtype=torch.int32, device=device)
        max_tokens = self.table.shape[1] * page_tokens
        layout = CodeQuery.layout(n, num_heads, self.num_qo_heads, group_size, head_dim, bits)
        self.scratch = CodeQuery(**allocate(layout, device))
        self.buffers = TopKBuffers.allocate(
            n * num_heads, max_tokens, sizes[2], device, launch=launch
        )
        self.buffers.importance.fill_(-7)
        self.launch = launch and SMALL_CODES
        self.selection = torch.full((n, num_kv_heads, sizes[2]), -7, dtype=torch.int32)
        self.counts = torch.full((n, num_kv_heads), -7, dtype=torch.int32)
        lists = self.selection.to(device), self.counts.to(device)
        pinned = (torch.empty_like(x, device="cpu", pin_memory=device == "cuda") for x in lists)
        self.lists = TopKLists(*sizes, *lists, *(x.fill_(-7) for x in pinned))

    def _encoded(
        self, row: int, keys: torch.Tensor, kv_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, kv_len, width] and [H, kv_len]; also as the CPU has them."""
        if not kv_len:
            keys = keys.new_zeros(len(keys), 1, keys.shape[2])
        mean = mean_keys(keys)
        self.means[row] = mean.to(self.device)
        codes, scales = encode_keys(keys, mean, self.bits)
        self.codes.append(codes.contiguous())
        self.scales.append(scales)
        return codes.mT.flatten(1, 2)[:, :kv_len], scales[:, :kv_len]

    def options(self) -> dict[str, Any]:
        return {
            "group_size": self.group_size,
            "bits": self.bits,
            "page_tokens": self.page_tokens,
            "sm_scale": self.sm_scale,
            "level": float(LEVELS[self.bits][-1]),
            "scratch": self.scratch,
            "buffers": self.buffers,
            "lists": self.lists,
            "launch": self.launch,
        }

    def operands(self) -> tuple[torch.Tensor, ...]:
        return (
            self.query,
            self.rotation,
            self.means,
            self.table,
            self.positions,
            self.head_list,
        )

    def run(self) -> None:
        top_k_codes(*self.operands(), **self.options())
        if self.device == "cuda":
            torch.cuda.synchronize()

    def grouped(self, row: int, i: int) -> npt.NDArray[np.float64]:
        """A head's query [group_size, head_dim], times sm_scale."""
        query = self.query[row].double().cpu().numpy().reshape(-1, self.group_size, self.head_dim)
        return query[self.heads[i]] * self.sm_scale

    def exact(self, row: int, i: int) -> npt.NDArray[np.float64]:
        """The scores of a head's codes in float64."""
        kv_len = self.kv_lens[row]
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        codes = self.codes[row][i].mT.flatten(0, 1).numpy()[:kv_len]
        of_dims = codes[..., None] >> shifts & (1 << self.bits) - 1
        keys = LEVELS[self.bits].astype(np.float64)[of_dims.reshape(kv_len, -1)]
        query, scales = self.grouped(row, i), self.scales[row][i, :kv_len].double().numpy()
        rotated = query @ rotation(self.head_dim).astype(np.float64)
        return (scales * (rotated @ keys.T) + self.offsets(row, i)[:, None]).max(0)

    def offsets(self, row: int, i: int) -> npt.NDArray[np.float64]:
        """What the scores of a head's group start from."""
        return self.grouped(row, i) @ self.means[row, i].double().cpu().numpy()

    def of_cpu(self, row: int, i: int) -> npt.NDArray[np.float32]:
        """The scores of the CPU's kernel."""
        query = self.grouped(row, i).astype(np.float32)
        return score_codes(
            query @ rotation(self.head_dim),
            LEVELS[self.bits],
            query @ self.means[row, i].cpu().numpy(),
            self.codes[row][i].numpy(),
            self.scales[row][i].numpy(),
            n=self.kv_lens[row],
        ).numpy()

    def check(self) -> None:
        """What `run` wrote."""
        lists, (sinks, recent, budget) = self.lists, self.lists.sizes
        assert torch.equal(lists.selection.cpu(), lists.host_selection)
        assert torch.equal(lists.counts.cpu(), lists.host_counts)
        others = [x for x in range(lists.counts.shape[1]) if x not in self.heads]
        assert (lists.host_selection[:, others] == -7).all()
        assert (lists.host_counts[:, others] == -7).all()
        k = budget - sinks - recent
        for row, kv_len in enumerate(self.kv_lens):
            for i, head in enumerate(self.heads):
                count = int(lists.host_counts[row, head])
                chosen = lists.host_selection[row, head].numpy()
                assert (chosen[count:] == -7).all()
                if kv_len <= budget:
                    np.testing.assert_array_equal(chosen[:count], np.arange(kv_len))
                    continue
                last = kv_len - recent
                assert count == budget
                np.testing.assert_array_equal(chosen[:sinks], np.arange(sinks))
                np.testing.assert_array_equal(chosen[sinks + k :], np.arange(last, kv_len))
                chosen = chosen[sinks : sinks + k]
                assert (np.diff(chosen) > 0).all()
                exact, of_cpu = self.exact(row, i), self.of_cpu(row, i)
                spread = exact.std()
                # Errors of up to five deviations: a query's is 0.7 to 1 % of the scores'.
                for scores, slack in ((exact, 0.06 * spread), (of_cpu, 0.15 * spread)):
                    kth = np.sort(scores[sinks:last])[-k]
                    assert scores[chosen].min() >= kth - slack
                middle = slice(sinks, last)
                best = sinks + np.argsort(-of_cpu[middle], kind="stable")[:k]
                assert len(np.intersect1d(best, chosen)) >= 0.8 * k
                bits = self.buffers.importance[row * len(self.heads) + i, :kv_len].cpu()
                if (bits == -7).all():
                    continue  # the reference ran, which keeps none
                ours = bits[middle].view(torch.float32)
                keys = key_of(ours).numpy()
                ours = ours.numpy() + self.offsets(row, i).max()
                np.testing.assert_allclose(ours, exact[middle], 0, 0.06 * spread)
                assert np.sqrt(np.square(ours - exact[middle]).mean()) < 0.02 * spread
                expected = np.sort(sinks + np.argsort(-keys, kind="stable")[:k])
                np.testing.assert_array_equal(chosen, expected)


def check(device: str, kv_lens: list[int], **options: Any) -> None:
    case = Case(device, kv_lens, **options)
    case.run()
    case.check()


@pytest.mark.parametrize(("bits", "head_dim"), combinations([1, 2], [16, 80, 128, 256]))
def test_head_dims(device: str, head_dim: int, bits: int) -> None:
    check(device, [70, 0], head_dim=head_dim, bits=bits, heads=(1,))


@pytest.mark.parametrize(
    ("dtype", "group_size"), combinations([torch.float16, torch.bfloat16], [1, 3, 9])
)
def test_groups(device: str, group_size: int, dtype: torch.dtype) -> None:
    check(device, [90], group_size=group_size, dtype=dtype)


@pytest.mark.parametrize("kv_len", [1, 40, 41, 64, 65, 70, 71, 135])
def test_lengths(device: str, kv_len: int) -> None:
    check(device, [kv_len], heads=(1,))


@pytest.mark.parametrize(
    ("sizes", "page_tokens"), [((0, 0, 16), 16), ((0, 17, 30), 64), ((33, 0, 50), 128)]
)
def test_budgets_and_pages(device: str, sizes: tuple[int, int, int], page_tokens: int) -> None:
    check(device, [sizes[2] + 1, 130], sizes=sizes, page_tokens=page_tokens)


def test_ties_go_to_the_first(device: str) -> None:
    """A query of zeros has no scores: all of them are 0."""
    case = Case(device, [100], heads=(1,))
    case.query.zero_()
    case.run()
    tokens = [*range(34), *range(94, 100)]
    assert case.lists.host_selection[0, 1].tolist() == tokens


@pytest.mark.parametrize("factor", [1e-5, 1e5])
def test_scores_that_share_a_bin(device: str, factor: float) -> None:
    """More of them than a program holds: too small to tell apart, or too large."""
    case = Case(device, [100, 60], heads=(1,))
    case.query *= factor
    case.run()
    case.check()


@pytest.mark.parametrize(("ratio", "count"), [(0.1, 10), (0.05, 10), (0.25, 25)])
def test_a_ratio(device: str, ratio: float, count: int) -> None:
    """There are 100 tokens; 10 are sinks and recent ones."""
    case = Case(device, [100], heads=(1,))
    case.lists = replace(case.lists, ratio=ratio)
    case.run()
    assert case.lists.host_counts[0, 1] == count
    tokens = case.lists.host_selection[0, 1].numpy()
    ends = np.concatenate((tokens[:4], tokens[count - 6 : count]))
    np.testing.assert_array_equal(ends, [*range(4), *range(94, 100)])
    assert (tokens[count:] == -7).all()
    expected = np.sort(4 + np.argsort(-case.exact(0, 0)[4:94], kind="stable")[: count - 10])
    assert len(np.intersect1d(tokens[4 : count - 6], expected)) >= 0.9 * (count - 10)


def test_scratch_is_used_again(device: str) -> None:
    case = Case(device, [70, 50], heads=(1,))
    for _ in range(2):
        case.run()
        case.check()
        case.query.copy_(case.query.flip(1))


@pytest.mark.parametrize(
    ("kv_len", "bad"), [(12, float("nan")), (70, float("nan")), (70, float("inf"))]
)
def test_a_query_that_is_not_finite(device: str, kv_len: int, bad: float) -> None:
    case = Case(device, [kv_len, kv_len])
    case.query[0, (2 * 4 + 1) * 64 + 5] = bad  # of KV head 2
    with quiet_numpy():
        case.run()
    count = min(kv_len, 40)
    assert case.lists.host_counts[:, [0, 2]].tolist() == [[count, -1], [count, count]]


@pytest.mark.parametrize(
    ("token", "count", "bad"),
    combinations([(20, -1), (2, 40), (97, 40)], [float("nan"), float("inf")]),
)
def test_a_key_that_is_not_finite(device: str, bad: float, token: int, count: int) -> None:
    """Nothing is chosen, unless it is a sink or a recent token."""
    case = Case(device, [100], heads=(1,), page_tokens=128)
    case.pages[0, 128 * 16 :].view(torch.float32)[token] = bad
    with quiet_numpy():
        case.run()
    assert case.lists.host_counts[0, 1] == count


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("kv_lens", [[131072], [20011, 0, 4097, 3000]])
def test_real_sizes(kv_lens: list[int], bits: int) -> None:
    check(
        "cuda",
        kv_lens,
        bits=bits,
        head_dim=128,
        heads=tuple(range(8)),
        num_kv_heads=8,
        dtype=torch.bfloat16,
        sizes=(16, 64, 2912),
        page_tokens=256,
        launch=None,
    )


def test_wrong_operands() -> None:
    case = Case("cpu", [100])

    def refuses(message: str, *, query: torch.Tensor | None = None, **changed: Any) -> None:
        given, *others = case.operands()
        with pytest.raises(ValueError, match=message):
            top_k_codes(given if query is None else query, *others, **case.options() | changed)

    refuses("bits must be 1 or 2, got 3", bits=3)
    refuses("at least 2 groups of 8, got 12", group_size=8)
    refuses(r"scratch.bytes must be \[1, 2, 8, 16, 32\]", bits=1)
    refuses("page_tokens must be a power of two", page_tokens=48)
    refuses("within the budget of 30", lists=replace(case.lists, budget_tokens=30, sink_tokens=31))
    refuses("are of attention weights", lists=replace(case.lists, top_p=0.5))
    small = TopKBuffers.allocate(1, 128, 40, "cpu")
    refuses("for 2 lists of 128 tokens, got 1 of 128", buffers=small)
    with pytest.raises(ValueError, match="tile_tokens must be a power of two"):
        CodeLaunch(48)
