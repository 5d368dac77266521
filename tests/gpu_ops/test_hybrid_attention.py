"""hybrid_attention against float64: dense and listed heads, mixed lengths, numbers of programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, Pages, assert_close, attention, poisoned, random
from cases.seeded import new_rng

from gpu_ops.hybrid_attention import DENSE, HybridLaunch, hybrid_attention, hybrid_programs

SMALL = HybridLaunch(tile_tokens=16)


class Step:
    """Rows of one step: their pages, lists and poisoned outputs.

    Args:
        counts: per row and KV head blocks of the list, or DENSE; cut to the blocks that exist.
        listed_len: blocks are drawn of so many tokens, if rows are to be replayed at more lengths.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        kv_lens: list[int],
        counts: list[list[int]],
        *,
        head_dim: int = 64,
        group_size: int = 3,
        page_tokens: int = 32,
        block_tokens: int = 32,
        num_programs: int = 5,
        launch: HybridLaunch = SMALL,
    ) -> None:
        rng = self.rng = new_rng()
        n, num_kv_heads = len(kv_lens), len(counts[0])
        num_qo_heads = num_kv_heads * group_size
        self.kv_lens, self.block_tokens = kv_lens, block_tokens
        self.query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
        self.kv = [
            random(rng, 2, num_kv_heads, kv_len, head_dim, dtype=dtype, device=device)
            if kv_len
            else None
            for kv_len in kv_lens
        ]
        self.pages = Pages(rng, self.kv, page_tokens)
        self.positions = torch.tensor(kv_lens, device=device) - 1
        # What no list reaches must not be read: far outside of every page.
        max_blocks = max(1, -(-max(kv_lens) // block_tokens))
        shape = (n, num_kv_heads, max_blocks)
        self.indices = torch.full(shape, 2**30, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        for row, of_row in enumerate(counts):
            for kv_head, count in enumerate(of_row):
                self.set_list(row, kv_head, count)
        slots = num_programs + n * num_kv_heads
        self.out = poisoned(*self.query.shape, dtype=dtype, device=device)
        self.lse = poisoned(n, num_qo_heads, dtype=torch.float32, device=device)
        partial = {"dtype": torch.float32, "device": device}
        self.options: dict[str, Any] = {
            "num_kv_heads": num_kv_heads,
            "page_tokens": page_tokens,
            "block_tokens": block_tokens,
            "sm_scale": head_dim**-0.5,
            "partial_out": poisoned(slots, group_size, head_dim, **partial),
            "partial_lse": poisoned(slots, group_size, **partial),
            "launch": launch,
        }

    def set_list(self, row: int, kv_head: int, count: int) -> None:
        """A list of `count` blocks of the row, in no order; or dense."""
        exist = -(-self.kv_lens[row] // self.block_tokens)
        if count > 0:
            blocks = torch.from_numpy(self.rng.permutation(exist)[:count].astype(np.int32))
            count = len(blocks)
            self.indices[row, kv_head, :count] = blocks.to(self.indices.device)
        self.counts[row, kv_head] = count

    def run(self, **options: Any) -> None:
        hybrid_attention(
            self.query,
            self.pages.table,
            self.positions,
            self.indices,
            self.counts,
            out=self.out,
            lse=self.lse,
            **self.options | options,
        )

    def check(self, tolerance: float) -> None:
        """Compare every row and KV head with float64."""
        num_kv_heads = self.counts.shape[1]
        out = self.out.view(len(self.out), num_kv_heads, -1)
        query = self.query.view(out.shape)
        lse = self.lse.view(len(self.out), num_kv_heads, -1)
        expected, expected_lse = [], []
        for row, position in enumerate(self.positions.tolist()):
            for kv_head, count in enumerate(self.counts[row].tolist()):
                tokens = torch.arange(position + 1, device=self.query.device)
                if count >= 0:
                    listed = self.indices[row, kv_head, :count]
                    tokens = tokens[torch.isin(tokens // self.block_tokens, listed)]
                if not len(tokens):
                    assert (out[row, kv_head] == 0).all()
                    assert (lse[row, kv_head] == float("-inf")).all()
                    continue
                kv = self.kv[row][:, kv_head : kv_head + 1, tokens]
                sm_scale = self.options["sm_scale"]
                o, of_group = attention(query[row, kv_head], kv[0], kv[1], sm_scale)
                assert_close(out[row, kv_head], o, 4 * tolerance)  # a single group, by chance
                expected.append((out[row, kv_head], o))
                expected_lse.append((lse[row, kv_head], of_group))
        if expected:
            assert_close(*map(torch.cat, zip(*expected, strict=True)), tolerance)
            assert_close(*map(torch.cat, zip(*expected_lse, strict=True)), 1e-5)


def check(device: str, dtype: torch.dtype, *arguments: Any, **options: Any) -> None:
    step = Step(device, dtype, *arguments, **options)
    step.run()
    step.check(TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "group_size"), [(64, 1), (64, 3), (64, 4), (64, 7), (128, 1), (128, 4)]
)
def test_shapes(device: str, dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    counts = [[DENSE, 2], [1, DENSE], [2, 0]]
    check(device, dtype, [75, 0, 33], counts, head_dim=head_dim, group_size=group_size)


@pytest.mark.parametrize(
    "counts",
    [
        [[DENSE, DENSE], [DENSE, DENSE]],
        [[1, 1], [1, 1]],
        [[4, 2], [0, 1]],
        [[0, 0], [0, 0]],
        [[0, DENSE], [3, 0]],
    ],
    ids=["all dense", "one block each", "all sparse", "nothing", "mixed"],
)
@pytest.mark.parametrize("num_programs", [1, 4, 64])
def test_lists(device: str, counts: list[list[int]], num_programs: int) -> None:
    check(device, torch.float32, [140, 101], counts, num_programs=num_programs)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130])
def test_lengths(device: str, kv_len: int) -> None:
    """The last block is in every full list, with as many tokens as the row has of it."""
    check(device, torch.float32, [kv_len], [[DENSE, 99, 1]], group_size=1)


@pytest.mark.parametrize(("page_tokens", "block_tokens"), [(16, 64), (64, 16), (64, 64)])
@pytest.mark.parametrize("tile_tokens", [16, 32, None])
def test_tiles(device: str, page_tokens: int, block_tokens: int, tile_tokens: int | None) -> None:
    check(
        device,
        torch.bfloat16,
        [203],
        [[DENSE, 2, 99]],
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        launch=replace(SMALL, tile_tokens=tile_tokens),
    )


@pytest.mark.parametrize("segment_tiles", [0, 1, 3])
def test_shares(device: str, segment_tiles: int) -> None:
    """Every program's share begins and ends somewhere else, at any number of them."""
    launch = replace(SMALL, segment_tiles=segment_tiles)
    for num_programs in (1, 2, 3, 7, 11, 40):
        check(
            device,
            torch.float32,
            [90, 0, 17],
            [[DENSE, 1], [2, DENSE], [1, DENSE]],
            group_size=1,
            num_programs=num_programs,
            launch=launch,
        )


def test_rows_grow_under_one_launch(device: str) -> None:
    step = Step(device, torch.float32, [130], [[DENSE, 2]], group_size=1)
    step.set_list(0, 1, 99)
    step.indices[0, 1] = step.indices[0, 1].sort().values
    for kv_len in (1, 32, 33, 95, 130):
        step.positions.fill_(kv_len - 1)
        step.counts[0, 1] = -(-kv_len // step.block_tokens)
        step.run()
        step.check(TOLERANCE[torch.float32])


def test_lse_is_optional(device: str) -> None:
    step = Step(device, torch.float32, [40], [[DENSE, 1]])
    step.run()
    out = step.out.clone()
    step.lse.fill_(7.0)
    hybrid_attention(
        step.query,
        step.pages.table,
        step.positions,
        step.indices,
        step.counts,
        out=step.out,
        **step.options,
    )
    assert torch.equal(step.out, out)
    assert (step.lse == 7.0).all()


REAL = {"page_tokens": 256, "block_tokens": 64}


def real_step(dtype: torch.dtype, launch: HybridLaunch, head_dim: int = 128) -> Step:
    counts = [[DENSE, *[64] * 7], [64] * 8, [DENSE] * 8, [0] * 8, [*[1] * 7, DENSE]]
    return Step(
        "cuda",
        dtype,
        [131072, 20011, 4096, 0, 1],
        counts,
        head_dim=head_dim,
        group_size=4,
        num_programs=hybrid_programs(torch.cuda.get_device_properties(0).multi_processor_count),
        launch=launch,
        **REAL,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "tile_tokens"), [(64, None), (128, None), (128, 32)])
def test_real_sizes(dtype: torch.dtype, head_dim: int, tile_tokens: int | None) -> None:
    step = real_step(dtype, HybridLaunch(tile_tokens=tile_tokens), head_dim)
    step.run()
    step.check(4 * TOLERANCE[dtype])  # long sums of what nearly cancels


@pytest.mark.cuda
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize(
    ("merges_early", "starts_early"), [(False, False), (True, False), (True, True), (False, True)]
)
def test_graph_replays_with_other_lists(
    merges_early: bool, starts_early: bool, prefetches: bool
) -> None:
    if (merges_early or starts_early) and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    launch = HybridLaunch(
        merges_early=merges_early, starts_early=starts_early, prefetches=prefetches
    )
    step = real_step(torch.bfloat16, launch)
    step.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
        step.run()  # the next one must not start before the merge has read its slots
    for kv_len, counts in ((131072, [64] * 8), (65, [DENSE] * 8), (100001, [DENSE, 3] * 4)):
        step.positions[0] = kv_len - 1
        step.kv_lens[0] = kv_len
        for kv_head, count in enumerate(counts):
            step.set_list(0, kv_head, count)
        step.out.fill_(float("nan"))
        graph.replay()
        step.check(4 * TOLERANCE[torch.bfloat16])


def test_wrong_operands() -> None:
    step = Step("cpu", torch.float32, [40], [[DENSE, 1]])
    for block_tokens in (8, 48):
        with pytest.raises(ValueError, match=f"block_tokens must be a power .* got {block_tokens}"):
            step.run(block_tokens=block_tokens)
    with pytest.raises(ValueError, match=r"tile_tokens must be a power of two .* got 24"):
        step.run(launch=HybridLaunch(tile_tokens=24))
    with pytest.raises(ValueError, match=r"more slots than the 2 pairs .* got 2"):
        step.run(partial_out=torch.zeros(2, 3, 64), partial_lse=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"partial_lse must be \[7, 3\], got \[6, 3\]"):
        step.run(partial_lse=torch.zeros(6, 3))
    step.counts = step.counts[:, :1]
    with pytest.raises(ValueError, match=r"block_counts must be \[1, 2\], got \[1, 1\]"):
        step.run()
