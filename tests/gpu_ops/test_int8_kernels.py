"""Kernels on int8 rows against float64 of the rows' numbers; and the rows that kernels make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.host_pages import HostPages, Selections
from cases.operands import (
    DTYPES,
    TOLERANCE,
    Pages,
    assert_close,
    attention,
    poisoned,
    quiet_numpy,
    random,
)
from cases.pairwise import pairwise
from cases.seeded import new_rng

from gpu_ops.fetch_rows import fetch_rows
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gathered_attention import MissingRows, gathered_attention
from gpu_ops.online_softmax import Tiles
from gpu_ops.paged_attention import retrieval_attention
from gpu_ops.rope_publish import rope_publish
from gpu_ops.row_format import as_numbers, as_rows, row_items, write_int8
from gpu_ops.window_attention import window_attention

KV_HEADS, GROUP_SIZE, PAGE_TOKENS, SPLITS = 2, 3, 16, 3
HEADS = KV_HEADS * GROUP_SIZE
HEAD_DIMS = [16, 48, 64, 80, 128, 192]
BAD = [float("nan"), float("inf")]
SHAPES = pytest.mark.parametrize(("dtype", "head_dim"), pairwise(DTYPES, HEAD_DIMS), ids=str)


class Step:
    """Rows of KV_LENS tokens, the last of which has numbers in head 1 that are none."""

    KV_LENS = (37, 16, 3, 1, 20)

    def __init__(self, device: str, dtype: torch.dtype, head_dim: int) -> None:
        self.rng, self.device, self.dtype, self.head_dim = new_rng(), device, dtype, head_dim
        self.sm_scale, n = head_dim**-0.5, len(self.KV_LENS)
        self.query = self.random(n, HEADS * head_dim, scale=2.0)
        self.kv = [self.random(2, KV_HEADS, kv_len, head_dim) for kv_len in self.KV_LENS]
        self.kv[0][:, :, 5] = 0.0
        with quiet_numpy():
            self.kv[-1][0, 1, 7, 3], self.kv[-1][1, 1, 0, head_dim - 1] = BAD
        self.rows = [as_rows(x, torch.int8) for x in self.kv]
        self.positions = torch.tensor(self.KV_LENS, device=device) - 1

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return random(self.rng, *shape, dtype=self.dtype, device=self.device, scale=scale)

    def scratch(self, *shape: int) -> torch.Tensor:
        return poisoned(*shape, dtype=torch.float32, device=self.device)

    def expected(self, row: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64, of int8 rows [2, KV_HEADS, kv_len, row] as the dtype has their numbers."""
        keys, values = as_numbers(rows, self.head_dim).to(self.dtype)
        return attention(self.query[row], keys, values, self.sm_scale)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        for row, rows in enumerate(self.rows):
            o, expected_lse = self.expected(row, rows)
            finite = o.isfinite()
            assert torch.equal(out[row].isfinite(), finite)
            assert_close(out[row][finite], o[finite], TOLERANCE[self.dtype])
            if lse is not None:
                finite = expected_lse.isfinite()
                assert torch.equal(lse[row].isfinite(), finite)
                assert_close(
                    lse[row][finite], expected_lse[finite], max(1e-5, TOLERANCE[self.dtype])
                )


@SHAPES
def test_window_attention(device: str, dtype: torch.dtype, head_dim: int) -> None:
    step = Step(device, dtype, head_dim)
    tokens = max(step.KV_LENS)
    window = step.rows[0].new_full(
        (len(step.rows), 2, KV_HEADS, tokens, step.rows[0].shape[-1]), -128
    )
    for row, rows in enumerate(step.rows):
        window[row, :, :, : rows.shape[2]] = rows
    out, lse = step.scratch(*step.query.shape), step.scratch(len(window), HEADS)
    with quiet_numpy():
        window_attention(
            step.query, window, step.positions, sm_scale=step.sm_scale, out=out, lse=lse
        )
    step.check(out, lse)


@SHAPES
def test_paged_attention(device: str, dtype: torch.dtype, head_dim: int) -> None:
    step = Step(device, dtype, head_dim)
    pages = Pages(step.rng, step.rows, PAGE_TOKENS)
    n = len(step.rows)
    out = poisoned(*step.query.shape, dtype=dtype, device=device)
    with quiet_numpy():
        retrieval_attention(
            step.query,
            pages.table,
            step.positions,
            None,
            group_size=GROUP_SIZE,
            page_tokens=PAGE_TOKENS,
            sm_scale=step.sm_scale,
            partial_out=step.scratch(n, HEADS, SPLITS, head_dim),
            partial_lse=step.scratch(n, HEADS, SPLITS),
            out=out,
            page_dtype=torch.int8,
        )
    step.check(out)


@pytest.mark.parametrize("brings", [False, True])
@SHAPES
def test_gathered_attention(device: str, dtype: torch.dtype, head_dim: int, brings: bool) -> None:
    """Copied by `gather_rows`, or brought while they are attended to; beside a window."""
    step = Step(device, dtype, head_dim)
    kv_lens, capacity, n = [60, 44], 32, 2
    middle = [[20, 32], [5, 0]]
    lists = Selections(step.rng, device, kv_lens, middle, capacity)
    host = int8_host_pages(step, kv_lens)
    heads = torch.arange(KV_HEADS, dtype=torch.int32, device=device)
    row = row_items(head_dim, torch.int8)
    gathered = torch.full((n, 2, KV_HEADS, capacity, row), -128, dtype=torch.int8, device=device)
    positions = torch.tensor(kv_lens, device=device) - 1
    missing = None
    if brings:
        token_of = torch.full((n, KV_HEADS, capacity), -1, dtype=torch.int32)
        for i in range(n):
            for head in range(KV_HEADS):
                chosen = lists.of_head(i, head).int()
                token_of[i, head, : len(chosen)] = -2 - chosen
        missing = MissingRows(token_of.to(device), 0, host.table, PAGE_TOKENS)
    else:
        gather_rows(
            lists.selection,
            lists.counts,
            host.table,
            positions,
            heads,
            num_kv_heads=KV_HEADS,
            page_tokens=PAGE_TOKENS,
            out=gathered,
            **lists.options(),
        )
    window = as_rows(step.random(n, 2, KV_HEADS, 7, head_dim), torch.int8)
    out = poisoned(n, HEADS * head_dim, dtype=dtype, device=device)
    gathered_attention(
        step.query[:n],
        gathered,
        lists.counts,
        positions,
        heads,
        group_size=GROUP_SIZE,
        sm_scale=step.sm_scale,
        partial_out=step.scratch(n, HEADS, SPLITS + 1, head_dim),
        partial_lse=step.scratch(n, HEADS, SPLITS + 1),
        out=out,
        window=window,
        missing=missing,
        **lists.options(),
    )
    for i in range(n):
        for head in range(KV_HEADS):
            chosen = lists.of_head(i, head)
            brought = gathered[i, :, head, : len(chosen)].cpu()
            assert torch.equal(brought, host.kv[i][:, head, chosen])
            assert (gathered[i, :, head, len(chosen) :] == -128).all()
            of_head = torch.cat((window[i, :, head].cpu(), brought), dim=1)[:, None]
            keys, values = as_numbers(of_head, head_dim).to(dtype)
            q = step.query[i].view(KV_HEADS, -1)[head].cpu()
            o, _ = attention(q, keys, values, step.sm_scale)
            assert_close(out[i].view(KV_HEADS, -1)[head], o, TOLERANCE[dtype])


def int8_host_pages(step: Step, kv_lens: list[int]) -> HostPages:
    """Pages of int8 rows; `kv` has the rows."""
    sizes = {"num_kv_heads": KV_HEADS, "page_tokens": PAGE_TOKENS}
    row = row_items(step.head_dim, torch.int8)
    numbers = [
        random(step.rng, 2, KV_HEADS, n, step.head_dim, dtype=torch.float32, device="cpu")
        for n in kv_lens
    ]
    rows = [as_rows(x, torch.int8) for x in numbers]
    return HostPages(step.rng, step.device, torch.int8, kv_lens, head_dim=row, kv=rows, **sizes)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fetch_rows(device: str, head_dim: int) -> None:
    step = Step(device, torch.float32, head_dim)
    host = int8_host_pages(step, [40])
    pairs = torch.tensor([[39, 0], [17, 5], [2, 3]], dtype=torch.int32)
    fetches = pairs.expand(1, KV_HEADS, 3, 2).contiguous()
    hot_counts = torch.tensor([3, 6], dtype=torch.int32).expand(1, KV_HEADS, 2).contiguous()
    row = row_items(head_dim, torch.int8)
    hot = torch.full((1, 2, KV_HEADS, 8, row), -128, dtype=torch.int8, device=device)
    counts = torch.zeros(1, KV_HEADS, dtype=torch.int32, device=device)
    fetch_rows(
        fetches.to(device),
        hot_counts.to(device),
        host.table,
        torch.tensor([39], device=device),
        torch.arange(KV_HEADS, dtype=torch.int32, device=device),
        page_tokens=PAGE_TOKENS,
        sink_tokens=2,
        recent_tokens=5,
        hot=hot,
        counts=counts,
    )
    expected = torch.full(hot.shape, -128, dtype=torch.int8)
    for token, place in pairs.tolist()[1:]:  # the last token is in the window
        expected[0, :, :, place] = host.kv[0][:, :, token]
    assert torch.equal(hot.cpu(), expected)
    assert counts.tolist() == [[13] * KV_HEADS]


@SHAPES
def test_rows_are_made_as_on_the_cpu(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Bit for bit, in windows and in pages; numbers that are none stay such in their group."""
    rng, n = new_rng(), 7
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    qkv = random(rng, n, (HEADS + 2 * KV_HEADS) * head_dim, **options)
    scales = torch.tensor([1e-8, 1e-4, 1.0, 60.0, 3e4, 1.0, 1.0], device=device)
    qkv = (qkv.float() * scales[:, None]).clamp(-6e4, 6e4).to(dtype)
    qkv[5, -1], qkv[6, -head_dim] = BAD
    qkv[4, -2 * head_dim :] = 0.0
    # Halfway between two codes, where the scale is 1.
    qkv[3, -head_dim:] = 0.5 * torch.arange(head_dim, device=device)
    qkv[3, -head_dim::16] = 127.0
    angles = torch.ones(n, head_dim, **options)
    host_kv = poisoned(n, 2, KV_HEADS, head_dim, dtype=dtype, device=device)
    row = row_items(head_dim, torch.int8)
    window = torch.full((n, 2, KV_HEADS, 4, row), 99, dtype=torch.int8, device=device)
    pages = torch.full((n, 2, KV_HEADS, PAGE_TOKENS, row), 99, dtype=torch.int8, device=device)
    first, page_bytes = pages.data_ptr(), pages[0].numel()
    table = torch.tensor([[first + i * page_bytes] for i in range(n)], device=device)
    with quiet_numpy():
        rope_publish(
            qkv,
            angles,
            torch.zeros_like(angles),
            torch.full((n,), 2, device=device),
            num_kv_heads=KV_HEADS,
            query=torch.empty(n, HEADS * head_dim, **options),
            host_kv=host_kv,
            window=window,
            page_table=table,
            page_tokens=PAGE_TOKENS,
            row_dtype=torch.int8,
        )
        expected = torch.empty(n, 2, KV_HEADS, row, dtype=torch.int8)
        write_int8(host_kv.cpu(), expected)
    for made in (window[..., 2, :].cpu(), pages[..., 2, :].cpu()):
        assert torch.equal(made[:5], expected[:5])
        numbers, right = (as_numbers(x[5:], head_dim) for x in (made, expected))
        assert torch.equal(numbers.isfinite(), right.isfinite())
        assert not right.isfinite().all()
    for untouched in (window, pages):
        assert (untouched[..., :2, :] == 99).all()
        assert (untouched[..., 3:, :] == 99).all()
    made = torch.empty(n, 2, KV_HEADS, row, dtype=torch.int8, device=device)
    write_int8(host_kv, made)  # as prefill does
    assert torch.equal(made.cpu()[:5], expected[:5])


def test_small_weights_of_small_values(device: str) -> None:
    """The first of many tokens has most of the weight, and zeros: float16 has no products of the
    others' weights, 2e-5, and scales of their values, but what they are together."""
    n, head_dim, kv_len = 1, 64, 300
    step = Step(device, torch.float16, head_dim)
    query = torch.full((n, HEADS * head_dim), 1.0, dtype=torch.float16, device=device)
    kv = step.random(2, KV_HEADS, kv_len, head_dim, scale=0.02).abs()
    kv[0], kv[:, :, 0] = 0.0, 0.0
    kv[0, :, 0] = 11.0 / head_dim / step.sm_scale
    rows = as_rows(kv, torch.int8)
    pages = Pages(step.rng, [rows], PAGE_TOKENS)
    out = poisoned(*query.shape, dtype=torch.float16, device=device)
    with quiet_numpy():
        retrieval_attention(
            query,
            pages.table,
            torch.tensor([kv_len - 1], device=device),
            None,
            group_size=GROUP_SIZE,
            page_tokens=PAGE_TOKENS,
            sm_scale=step.sm_scale,
            partial_out=step.scratch(n, HEADS, SPLITS, head_dim),
            partial_lse=step.scratch(n, HEADS, SPLITS),
            out=out,
            page_dtype=torch.int8,
        )
    keys, values = as_numbers(rows, head_dim).half()
    expected, _ = attention(query[0], keys, values, step.sm_scale)
    assert_close(out[0], expected, 0.01)


def test_tiles_of_rows_that_are_converted() -> None:
    """Twice as many tokens would take too many registers."""
    assert Tiles.of(128, 4, 2, torch.int8).tokens == Tiles.of(128, 4, 2).tokens // 2 == 32
    assert Tiles.of(128, 4, 4, torch.int8).tokens == Tiles.of(128, 4, 4).tokens == 32
    assert Tiles.of(576, 20, 2, torch.int8, 512).tokens == 16
