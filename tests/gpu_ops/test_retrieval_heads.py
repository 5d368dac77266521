"""retrieval_attention and top_k_tokens one after the other, as in a decode step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases.operands import TOLERANCE, Pages, assert_close, attention, random
from cases.seeded import new_rng

from gpu_ops.paged_attention import num_retrieval_splits, retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_tokens import top_k_tokens

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
