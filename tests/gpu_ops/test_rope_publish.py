"""rope_publish: the rotation against float64, and each place it writes to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, poisoned, random
from cases.pairwise import pairwise
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.rope_publish import rope_publish
from offload.prefill.layer import rotate

EPS = 1e-6
PAGE_TOKENS = 16


class Step:
    """Rows of one decode step: their projections, angles and poisoned outputs."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        positions: list[int],
        *,
        head_dim: int = 64,
        num_kv_heads: int = 2,
        group_size: int = 3,
        has_norm: bool = False,
    ) -> None:
        rng = new_rng()
        n, num_qo_heads = len(positions), num_kv_heads * group_size
        self.num_kv_heads, self.num_qo_heads = num_kv_heads, num_qo_heads
        self.dtype, self.device, self.head_dim = dtype, device, head_dim
        width = (num_qo_heads + 2 * num_kv_heads) * head_dim
        self.qkv = random(rng, n, width, dtype=dtype, device=device)
        angles = torch.from_numpy(rng.uniform(0, 6.28, (n, head_dim // 2)))
        angles = torch.cat((angles, angles), dim=1)
        self.cos, self.sin = (
            x.to(device=device, dtype=dtype) for x in (angles.cos(), angles.sin())
        )
        self.positions = torch.tensor(positions, device=device)
        self.active = [row for row, position in enumerate(positions) if position >= 0]
        self.norms: dict[str, Any] = {}
        if has_norm:
            for name in ("q_norm", "k_norm"):
                self.norms[name] = random(rng, head_dim, dtype=dtype, device=device)
        self.query = poisoned(n, num_qo_heads * head_dim, dtype=dtype, device=device)
        on_gpu = device == "cuda"
        self.host_query = poisoned(*self.query.shape, dtype=dtype, device="cpu")
        self.host_kv = poisoned(n, 2, num_kv_heads, head_dim, dtype=dtype, device="cpu")
        if on_gpu:
            self.host_query, self.host_kv = self.host_query.pin_memory(), self.host_kv.pin_memory()

    def publish(self, **options: Any) -> None:
        rope_publish(
            self.qkv,
            self.cos,
            self.sin,
            self.positions,
            num_kv_heads=self.num_kv_heads,
            query=self.query,
            host_query=self.host_query,
            host_kv=self.host_kv,
            norm_eps=EPS,
            **self.norms,
            **options,
        )
        if self.device == "cuda":
            torch.cuda.synchronize()

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 q [n, num_qo_heads * head_dim] and kv [n, 2, num_kv_heads, head_dim]."""
        x = self.qkv.double().cpu().unflatten(1, (-1, self.head_dim))
        q, kv = x[:, : self.num_qo_heads], x[:, self.num_qo_heads :]
        k, v = kv[:, : self.num_kv_heads], kv[:, self.num_kv_heads :]
        cos, sin = self.cos.double().cpu()[:, None], self.sin.double().cpu()[:, None]
        rotated = []
        for part, name in ((q, "q_norm"), (k, "k_norm")):
            if name in self.norms:
                inverse = 1 / (part.square().mean(-1, keepdim=True) + EPS).sqrt()
                part = part * inverse * self.norms[name].double().cpu()
            half = self.head_dim // 2
            turned = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
            rotated.append(part * cos + turned * sin)
        return rotated[0].flatten(1), torch.stack((rotated[1], v), dim=1)


@pytest.mark.parametrize(
    ("dtype", "sizes", "has_norm"),
    pairwise(DTYPES, [(64, 3), (128, 4), (96, 1)], [False, True]),
    ids=str,
)
def test_rotates(device: str, dtype: torch.dtype, sizes: tuple[int, int], has_norm: bool) -> None:
    head_dim, group_size = sizes
    step = Step(
        device, dtype, [5, -1, 0], head_dim=head_dim, group_size=group_size, has_norm=has_norm
    )
    step.publish()
    query, kv = step.expected()
    for actual in (step.query, step.host_query):
        assert_close(actual[step.active], query[step.active], TOLERANCE[dtype])
        assert actual[1].isnan().all()
    assert_close(step.host_kv[step.active], kv[step.active], TOLERANCE[dtype])
    assert torch.equal(step.host_kv[step.active][:, 1].double(), kv[step.active][:, 1])
    assert step.host_kv[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_like_prefill(device: str, dtype: torch.dtype) -> None:
    step = Step(device, dtype, [7, 8])
    step.publish()
    queries = step.qkv[:, : step.num_qo_heads * 64].unflatten(1, (-1, 64))
    expected = rotate(queries, step.cos, step.sin).transpose(0, 1).flatten(1)
    assert torch.equal(step.query, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_queries(device: str, dtype: torch.dtype) -> None:
    """Rounded again, as transformers does it; keys and values stay."""
    step = Step(device, dtype, [5, -1, 0])
    step.publish()
    query, kv = step.query.clone(), step.host_kv.clone()
    scale = torch.tensor([1.3, 2.0, 0.7], dtype=dtype, device=device)
    step.publish(query_scale=scale)
    expected = (query * scale[:, None])[step.active]
    for actual in (step.query, step.host_query):
        assert torch.equal(actual[step.active].cpu(), expected.cpu())
    assert torch.equal(step.host_kv[step.active], kv[step.active])
    with pytest.raises(ValueError, match=r"query_scale must be \[3\], got"):
        step.publish(query_scale=scale[:2])


@pytest.mark.parametrize(("sink_tokens", "recent_tokens"), combinations([0, 4], [0, 1, 8]))
def test_window_slots(device: str, sink_tokens: int, recent_tokens: int) -> None:
    if sink_tokens + recent_tokens == 0:
        pytest.skip("there is no window")
    positions = [-1, 0, 3, 4, 11, 12, 4 + 8 * 1000 + 5]
    step = Step(device, torch.float32, positions)
    tokens = sink_tokens + recent_tokens
    shape = (len(positions), 2, step.num_kv_heads, tokens, 64)
    window = poisoned(*shape, dtype=torch.float32, device=device)
    step.publish(window=window, sink_tokens=sink_tokens)
    expected = torch.full(shape, float("nan"))
    for row in step.active:
        index = position = positions[row]
        if position >= sink_tokens:
            if not recent_tokens:
                continue
            index = sink_tokens + (position - sink_tokens) % recent_tokens
        expected[row, :, :, index] = step.host_kv[row]
    assert torch.equal(window.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))


class RowPages:
    """Each row's own poisoned pages of `num_heads` heads, in memory at `device`.

    Attributes:
        table: int64 [n, max_pages] of their addresses, on the step's device.
    """

    def __init__(
        self, step: Step, max_pages: int, num_heads: int, device: str, parts: int = 2
    ) -> None:
        n = len(step.positions)
        shape = (n, max_pages, parts, num_heads, PAGE_TOKENS, step.head_dim)
        self.step = step
        self.pages = poisoned(*shape, dtype=step.dtype, device=device)
        if device != step.device:
            self.pages = self.pages.pin_memory()
        self.order = new_rng().permutation(max_pages)  # a table need not be in that of addresses
        page_bytes = self.pages[0, 0].numel() * self.pages.element_size()
        first = self.pages.data_ptr() + np.arange(n)[:, None] * max_pages * page_bytes
        table = torch.from_numpy(first + self.order * page_bytes)
        table[step.positions.cpu() < 0] = 0  # an inactive row's pages may be gone
        self.table = table.to(step.device)

    def check(self, heads: list[int]) -> None:
        """The pages hold the rows' `heads`, where their positions are, and nothing else."""
        expected = torch.full(self.pages.shape, float("nan"), dtype=self.step.dtype)
        for row in self.step.active:
            page, slot = divmod(int(self.step.positions[row]), PAGE_TOKENS)
            rows = self.step.host_kv[row, : self.pages.shape[2], heads]
            expected[row, self.order[page], :, :, slot] = rows
        assert torch.equal(self.pages.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))


PLACES = [(held, True) for held in ("all heads", "some heads", "no heads")]
PLACES += [(held, False) for held in ("all heads", "some heads")]


@pytest.mark.parametrize(
    ("dtype", "shape", "places"), pairwise(DTYPES, [(3, 64), (1, 96), (2, 128)], PLACES), ids=str
)
def test_pages(
    device: str, dtype: torch.dtype, shape: tuple[int, int], places: tuple[str, bool]
) -> None:
    (num_kv_heads, head_dim), (on_gpu, on_host) = shape, places
    positions = [0, PAGE_TOKENS - 1, PAGE_TOKENS, -1, 3 * PAGE_TOKENS + 5, 4 * PAGE_TOKENS - 1]
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    step = Step(device, dtype, positions, has_norm=True, **sizes)
    heads = list(range(num_kv_heads))
    written: list[tuple[RowPages, list[int]]] = []
    options: dict[str, Any] = {}
    if on_host:
        host = RowPages(step, 6, num_kv_heads, "cpu")
        options["host_pages"] = host.table
        written.append((host, heads))
    if on_gpu != "no heads":
        held = heads if on_gpu == "all heads" else heads[-1:]
        resident = RowPages(step, 4, len(held), step.device)
        options["page_table"] = resident.table
        written.append((resident, held))
        if on_gpu == "some heads":
            slots = torch.tensor([held.index(head) if head in held else -1 for head in heads])
            options["page_slots"] = slots.int().to(device)
            options["num_page_heads"] = len(held)
    step.publish(page_tokens=PAGE_TOKENS, **options)
    for pages, of_heads in written:
        pages.check(of_heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [[0, 1], [1]])
def test_keys_alone(device: str, dtype: torch.dtype, held: list[int]) -> None:
    """In the window, in pages and on the host; values are written nowhere."""
    positions = [0, PAGE_TOKENS, -1, 3 * PAGE_TOKENS + 5]
    step = Step(device, dtype, positions)
    window = poisoned(len(positions), 1, 2, 4 + 8, 64, dtype=dtype, device=device)
    host, resident = RowPages(step, 6, 2, "cpu", 1), RowPages(step, 4, len(held), step.device, 1)
    some: dict[str, Any] = {}
    if len(held) < 2:
        slots = torch.tensor([-1, 0], dtype=torch.int32, device=device)
        some = {"page_slots": slots, "num_page_heads": 1}
    step.publish(
        window=window,
        sink_tokens=4,
        page_table=resident.table,
        host_pages=host.table,
        page_tokens=PAGE_TOKENS,
        keys_only=True,
        **some,
    )
    query, kv = step.expected()
    assert_close(step.query[step.active], query[step.active], TOLERANCE[dtype])
    assert_close(step.host_kv[step.active, 0], kv[step.active, 0], TOLERANCE[dtype])
    assert step.host_kv[:, 1].isnan().all()
    host.check([0, 1])
    resident.check(held)
    expected = torch.full(window.shape, float("nan"), dtype=dtype)
    for row in step.active:
        position = positions[row]
        index = position if position < 4 else 4 + (position - 4) % 8
        expected[row, 0, :, index] = step.host_kv[row, 0]
    assert torch.equal(window.cpu().nan_to_num(99.0), expected.nan_to_num(99.0))


def test_host_pages_without_a_mailbox(device: str) -> None:
    step = Step(device, torch.bfloat16, [PAGE_TOKENS, -1])
    host = RowPages(step, 2, step.num_kv_heads, "cpu")
    step.publish()  # what is expected: `host.check` compares with the mailbox
    mailbox, step.host_kv = step.host_kv, None
    step.publish(host_pages=host.table, page_tokens=PAGE_TOKENS)
    step.host_kv = mailbox
    host.check(list(range(step.num_kv_heads)))


def test_only_the_query_is_required(device: str) -> None:
    step = Step(device, torch.float32, [3])
    rope_publish(step.qkv, step.cos, step.sin, step.positions, num_kv_heads=2, query=step.query)
    assert_close(step.query, step.expected()[0], TOLERANCE[torch.float32])


def test_wrong_operands() -> None:
    step = Step("cpu", torch.float32, [3])
    with pytest.raises(ValueError, match=r"page_tokens must be a power of two .* 16, got 24"):
        step.publish(page_table=torch.zeros(1, 4, dtype=torch.int64), page_tokens=24)
    with pytest.raises(ValueError, match=r"page_tokens must be a power of two .* 16, got 0"):
        step.publish(host_pages=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"host_pages must be torch.int64, got torch.int32"):
        step.publish(host_pages=torch.zeros(1, 4, dtype=torch.int32), page_tokens=PAGE_TOKENS)
    with pytest.raises(ValueError, match=r"host_pages must be \[1, 4\], got \[2, 4\]"):
        step.publish(host_pages=torch.zeros(2, 4, dtype=torch.int64), page_tokens=PAGE_TOKENS)
    with pytest.raises(ValueError, match=r"sink_tokens must be in \[0, 8\].* got 9"):
        step.publish(window=torch.zeros(1, 2, 2, 8, 64), sink_tokens=9)
    with pytest.raises(ValueError, match=r"multiple of num_kv_heads, got 2 and 4"):
        rope_publish(step.qkv, step.cos, step.sin, step.positions, num_kv_heads=4, query=step.query)
    step.positions = step.positions.int()
    with pytest.raises(ValueError, match=r"positions must be torch.int64, got torch.int32"):
        step.publish()
