"""retrieval_attention against float64, of all heads and of some; and top_k_tokens after it, as in a
decode step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, Pages, assert_close, attention, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.checks import num_parts
from gpu_ops.paged_attention import num_kv_splits, num_retrieval_splits, retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens


def check(
    device: str,
    dtype: torch.dtype,
    kv_lens: list[int],
    *,
    heads: tuple[int, ...] | None = None,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    group_size: int = 3,
    page_tokens: int = 16,
    num_splits: int = 4,
    with_scores: bool = True,
    has_sinks: bool = False,
    latent_dim: int = 0,
    softcap: float = 0.0,
    tolerance: float | None = None,
) -> None:
    """With None as `heads` all attend, and there are no scores and no lse."""
    rng, some = new_rng(), heads is not None
    chosen = list(range(num_kv_heads) if heads is None else heads)
    n, num_qo_heads, sm_scale = len(kv_lens), num_kv_heads * group_size, head_dim**-0.5
    parts = num_parts(latent_dim)
    query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
    kv = [
        random(rng, parts, len(chosen), m, head_dim, dtype=dtype, device=device) if m else None
        for m in kv_lens
    ]
    pages = Pages(rng, kv, page_tokens)
    float32 = {"dtype": torch.float32, "device": device}
    out_dtype = torch.float32 if some else dtype
    out = poisoned(n, num_qo_heads * head_dim, dtype=out_dtype, device=device)
    lse = poisoned(n, num_qo_heads, **float32)
    max_tokens = pages.table.shape[1] * page_tokens
    scores = poisoned(n, len(chosen), group_size, max_tokens, **float32)
    sinks = random(rng, num_qo_heads, **float32, scale=4.0) if has_sinks else None
    of_chosen = None if sinks is None else sinks.view(num_kv_heads, -1)[chosen]
    retrieval_attention(
        query,
        pages.table,
        torch.tensor(kv_lens, device=device) - 1,
        torch.tensor(heads, dtype=torch.int32, device=device) if some else None,
        group_size=group_size,
        page_tokens=page_tokens,
        sm_scale=sm_scale,
        partial_out=poisoned(n, num_qo_heads, num_splits, head_dim, **float32),
        partial_lse=poisoned(n, num_qo_heads, num_splits, **float32),
        out=out,
        lse=lse if some else None,
        scores=scores if some and with_scores else None,
        sinks=sinks,
        latent_dim=latent_dim,
        softcap=softcap,
    )
    if latent_dim:
        assert out.view(n, -1, head_dim)[..., latent_dim:].isnan().all()
        out = out.view(n, -1, head_dim)[..., :latent_dim].contiguous()
    others = [head for head in range(num_kv_heads) if head not in chosen]
    of_out, of_lse = out.view(n, num_kv_heads, -1), lse.view(n, num_kv_heads, -1)
    assert of_out[:, others].isnan().all()
    assert of_lse[:, others].isnan().all()
    tolerance = tolerance or TOLERANCE[dtype]
    for row, (x, kv_len) in enumerate(zip(kv, kv_lens, strict=True)):
        assert scores[row, :, :, kv_len:].isnan().all()  # there is no token
        if x is None:
            assert (of_out[row, chosen] == 0).all()
            assert not some or (of_lse[row, chosen] == float("-inf")).all()
            continue
        q = query[row].view(num_kv_heads, -1)[chosen].flatten()
        values = x[-1, ..., : latent_dim or head_dim]
        expected, expected_lse = attention(q, x[0], values, sm_scale, of_chosen, softcap)
        assert_close(of_out[row, chosen].flatten(), expected, tolerance)
        if not some:
            continue
        # Rounding the weights to the dtype makes no difference to their sum.
        assert_close(of_lse[row, chosen].flatten(), expected_lse, 4 * TOLERANCE[torch.float32])
        grouped = q.double().view(len(chosen), group_size, head_dim)
        products = grouped @ x[0].double().transpose(1, 2) * sm_scale
        if softcap:
            products = softcap * torch.tanh(products / softcap)
        products *= math.log2(math.e)
        if with_scores:
            assert_close(scores[row, :, :, :kv_len], products, 4 * TOLERANCE[torch.float32])
        else:
            assert scores[row].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size"),
    combinations(DTYPES, [(64, 3), (128, 4), (128, 1), (64, 7)]),
)
def test_shapes(device: str, dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    check(device, dtype, [50, 0, 1], head_dim=head_dim, group_size=group_size, heads=(0, 2))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size"),
    combinations(DTYPES, [(64, 3), (128, 4), (128, 1), (96, 20)]),
)
def test_shapes_of_all_heads(
    device: str, dtype: torch.dtype, head_dim: int, group_size: int
) -> None:
    check(device, dtype, [50, 0, 1], head_dim=head_dim, num_kv_heads=2, group_size=group_size)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "latent_dim", "group_size"),
    combinations(DTYPES, [(576, 512), (288, 256), (448, 384), (320, 0), (48, 32)], [20, 128]),
)
def test_latents(
    device: str, dtype: torch.dtype, head_dim: int, latent_dim: int, group_size: int
) -> None:
    """A rest of a head, and values of its front; groups of several programs."""
    sizes = {"head_dim": head_dim, "latent_dim": latent_dim, "group_size": group_size}
    check(device, dtype, [50, 0, 1], num_kv_heads=1, **sizes)
    check(device, dtype, [17], num_kv_heads=2, heads=(1,), **sizes, has_sinks=True)


@pytest.mark.parametrize(
    ("dtype", "heads", "num_splits"), combinations(DTYPES, [(None,), ((2, 0),)], [1, 4])
)
def test_sinks(
    device: str, dtype: torch.dtype, heads: tuple[int, ...] | None, num_splits: int
) -> None:
    """They are in what heads give, and neither in their lse nor in their scores."""
    options = {"heads": heads, "num_splits": num_splits, "has_sinks": True}
    check(device, dtype, [50, 0, 1, 130], **options)


@pytest.mark.parametrize(
    ("dtype", "heads", "softcap"), combinations(DTYPES, [(None,), ((2, 0),)], [0.5, 2.0, 50.0])
)
def test_soft_caps(
    device: str, dtype: torch.dtype, heads: tuple[int, ...] | None, softcap: float
) -> None:
    """Of scores of some 2, which are rounded as numbers of the cap's size; sinks are not capped."""
    options = {"softcap": softcap, "has_sinks": softcap == 2.0, "tolerance": 2 * TOLERANCE[dtype]}
    check(device, dtype, [50, 0, 1, 130], heads=heads, **options)


@pytest.mark.parametrize("heads", [None, (1,)])
def test_lengths(device: str, heads: tuple[int, ...] | None) -> None:
    kv_lens = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 130]
    check(device, torch.float32, kv_lens, heads=heads, num_kv_heads=2)


def test_one_length_alone(device: str) -> None:
    for kv_len in (1, 17, 130):
        check(device, torch.float32, [kv_len], num_kv_heads=2)


@pytest.mark.parametrize("heads", [(0,), (3,), (0, 1), (1, 3), (0, 1, 2, 3)])
def test_heads(device: str, heads: tuple[int, ...]) -> None:
    check(device, torch.float32, [40, 17], heads=heads, num_kv_heads=4, group_size=1)


@pytest.mark.parametrize(
    ("with_scores", "num_splits"), combinations([True, False], [1, 3, 65, 130])
)
def test_splits(device: str, num_splits: int, with_scores: bool) -> None:
    check(
        device,
        torch.float32,
        [1, 40, 200, 0, 700],
        heads=(1,),
        num_splits=num_splits,
        with_scores=with_scores,
        head_dim=96,
        group_size=2,
    )


@pytest.mark.parametrize("num_splits", [1, 3, 33])
def test_splits_of_all_heads(device: str, num_splits: int) -> None:
    check(device, torch.float32, [1, 40, 200, 700], num_kv_heads=1, num_splits=num_splits)


@pytest.mark.parametrize(
    ("dtype", "heads", "page_tokens"), combinations(DTYPES, [(None, 32), (None, 256), ((1,), 256)])
)
def test_pages_of_several_tiles(
    device: str, dtype: torch.dtype, heads: tuple[int, ...] | None, page_tokens: int
) -> None:
    kv_lens = [1, 255, 256, 257, 1027]
    num_kv_heads = 1 if heads is None else 3
    check(device, dtype, kv_lens, heads=heads, num_kv_heads=num_kv_heads, page_tokens=page_tokens)


def test_batch_beyond_the_smallest_pieces(device: str) -> None:
    check(device, torch.float32, [5, 0, 300, 17, 64, 1, 0, 129, 16, 33], num_kv_heads=1)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group_size", "heads"),
    [
        (64, 8, 3, (0, 2)),
        (128, 8, 4, (5,)),
        (128, 8, 4, tuple(range(8))),
        (64, 3, 3, None),
        (128, 8, 4, None),
    ],
)
def test_real_sizes(
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    group_size: int,
    heads: tuple[int, ...] | None,
) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    num_splits = num_kv_splits(num_kv_heads, multiprocessors)
    if heads is not None:
        num_splits = num_retrieval_splits(len(heads), multiprocessors)
    check(
        "cuda",
        dtype,
        [131072, 1, 4096, 0, 20011],
        heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        group_size=group_size,
        page_tokens=256,
        num_splits=num_splits,
        tolerance=4 * TOLERANCE[dtype],  # long sums of what nearly cancels
    )


def test_number_of_splits() -> None:
    assert [num_kv_splits(n, 132) for n in (8, 3, 1)] == [33, 88, 128]
    assert num_kv_splits(64, 16) == 1
    assert num_retrieval_splits(8, 132) == 33  # two programs on each multiprocessor
    assert num_retrieval_splits(1, 132) == 264
    assert num_retrieval_splits(64, 16) == 1
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        num_retrieval_splits(0, 132)


def test_wrong_operands() -> None:
    query, table = torch.zeros(1, 128), torch.zeros(1, 2, dtype=torch.int64)
    position, heads = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    options = {
        "group_size": 1,
        "page_tokens": 16,
        "sm_scale": 1.0,
        "partial_out": torch.zeros(1, 2, 4, 64),
        "partial_lse": torch.zeros(1, 2, 4),
        "out": query.clone(),
        "lse": torch.zeros(1, 2),
    }

    def refuses(message: str, *, head_list: torch.Tensor = heads, **changed: Any) -> None:
        with pytest.raises(ValueError, match=message):
            retrieval_attention(query, table, position, head_list, **options | changed)

    refuses(r"page_tokens must be a power of two .* got 8", page_tokens=8)
    refuses("multiple of group_size, got 2 and 3", group_size=3)
    refuses("heads must be 1 to 1 KV heads, got 2", group_size=2, head_list=heads.repeat(2))
    refuses("heads must be torch.int32, got torch.int64", head_list=heads.long())
    refuses(r"partial_lse must be \[1, 2, 4\], got \[1, 2, 3\]", partial_lse=torch.zeros(1, 2, 3))
    refuses("room for all pages' 32 tokens, got 31", scores=torch.zeros(1, 1, 1, 31))
    refuses(r"scores must be \[1, 1, 1, 32\]", scores=torch.zeros(1, 1, 2, 32))
    refuses(r"num_splits must be in 1..1024", partial_out=torch.zeros(1, 2, 1025, 64))


HEADS, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = (0, 2), 3, 2, 64
SINKS, RECENT = 4, 8


class Step:
    """Two rows, whose pages hold all tokens that they will have.

    Args:
        replayed: the two operators are captured in a CUDA graph, twice.
    """

    def __init__(
        self,
        device: str,
        max_tokens: int,
        budget_tokens: int,
        *,
        shared: bool,
        replayed: bool,
    ) -> None:
        rng, self.dtype = new_rng(), torch.bfloat16
        self.device, self.budget_tokens, self.shared = device, budget_tokens, shared
        shape = (2, len(HEADS), max_tokens, HEAD_DIM)
        self.kv = [random(rng, *shape, dtype=self.dtype, device=device) for _ in range(2)]
        self.pages = Pages(rng, self.kv, 16)
        num_qo_heads = NUM_KV_HEADS * GROUP_SIZE
        self.query = random(
            rng, 2, num_qo_heads * HEAD_DIM, dtype=self.dtype, device=device, scale=3.0
        )
        self.positions = torch.tensor([-1, -1], device=device)
        self.heads = torch.tensor(HEADS, dtype=torch.int32, device=device)
        self.out = torch.zeros(2, num_qo_heads * HEAD_DIM, device=device)
        self.lse = torch.zeros(2, num_qo_heads, device=device)
        max_tokens = self.pages.table.shape[1] * 16
        self.scores = torch.zeros(2, len(HEADS), GROUP_SIZE, max_tokens, device=device)
        splits = num_retrieval_splits(len(HEADS), 4 if device == "cpu" else 132)
        self.partial_out = torch.zeros(2, num_qo_heads, splits, HEAD_DIM, device=device)
        self.partial_lse = self.partial_out[..., 0].contiguous()
        top_k = TopKLaunch.default(budget_tokens)
        if device == "cpu":
            top_k = TopKLaunch(16, 64, 4, 16, 64)
        self.buffers = TopKBuffers.allocate(4, max_tokens, budget_tokens, device, launch=top_k)
        lists = 1 if shared else NUM_KV_HEADS
        self.selection = torch.zeros(2, lists, budget_tokens, dtype=torch.int32, device=device)
        self.counts = torch.zeros(2, lists, dtype=torch.int32, device=device)
        self.run: Callable[[], None] = self.launch
        if replayed:
            self.launch()  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.launch()
                self.launch()
            self.run = graph.replay

    def launch(self) -> None:
        retrieval_attention(
            self.query,
            self.pages.table,
            self.positions,
            self.heads,
            group_size=GROUP_SIZE,
            page_tokens=16,
            sm_scale=HEAD_DIM**-0.5,
            partial_out=self.partial_out,
            partial_lse=self.partial_lse,
            out=self.out,
            lse=self.lse,
            scores=self.scores,
        )
        top_k_tokens(
            self.scores,
            self.lse,
            self.positions,
            self.heads,
            sink_tokens=SINKS,
            recent_tokens=RECENT,
            budget_tokens=self.budget_tokens,
            shared=self.shared,
            buffers=self.buffers,
            selection=self.selection,
            counts=self.counts,
        )

    def check(self, kv_lens: tuple[int, int]) -> None:
        self.positions.copy_(torch.tensor(kv_lens) - 1)
        self.out.fill_(float("nan"))
        self.counts.fill_(-7)
        self.run()
        chosen = list(HEADS)
        out = self.out.view(2, NUM_KV_HEADS, -1)[:, chosen]
        query = self.query.view(2, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM)[:, chosen].double()
        for row, kv_len in enumerate(kv_lens):
            counts = [0] if self.shared else chosen
            expected_count = min(kv_len, self.budget_tokens)
            assert self.counts[row, counts].tolist() == [expected_count] * len(counts)
            if kv_len == 0:
                assert (out[row] == 0).all()
                continue
            keys, values = self.kv[row][:, :, :kv_len]
            expected, _ = attention(query[row].flatten(), keys, values, HEAD_DIM**-0.5)
            assert_close(out[row].flatten(), expected, 2 * TOLERANCE[self.dtype])
            weights = (query[row] @ keys.double().transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1)
            importance = weights.sum((0, 1))[None] if self.shared else weights.sum(1)
            for of_head, target in zip(importance.cpu().numpy(), counts, strict=True):
                tokens = self.selection[row, target, :expected_count].cpu().numpy()
                assert (np.diff(tokens) > 0).all()
                if kv_len > self.budget_tokens:
                    ends = np.r_[:SINKS, kv_len - RECENT : kv_len]
                    assert np.isin(ends, tokens).all()
                    others = np.setdiff1d(np.arange(kv_len), tokens)
                    least = of_head[np.setdiff1d(tokens, ends)].min()
                    assert least >= of_head[others].max() * (1 - 1e-4)


LENGTHS = [(1, 0), (40, 17), (41, 39), (42, 250), (90, 300), (300, 300)]


@pytest.mark.parametrize("shared", [False, True])
def test_rows_grow(device: str, shared: bool) -> None:
    step = Step(device, 300, 40, shared=shared, replayed=False)
    for kv_lens in LENGTHS:
        step.check(kv_lens)


@pytest.mark.cuda
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scale", [1, 400])
def test_rows_grow_in_a_graph(scale: int, shared: bool) -> None:
    """Kernels are launched while those before them run."""
    step = Step("cuda", 300 * scale, 40 * scale, shared=shared, replayed=True)
    for first, second in LENGTHS:
        step.check((first * scale, second * scale))
