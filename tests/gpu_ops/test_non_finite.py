"""NaN and infinity in every operand of every attention kernel show in what comes out.

A step whose numbers went wrong must end in an error, which somebody can only raise who sees them:
what is no number here must not become one, or a part that attended to nothing. Float64 says where
results are numbers: a key whose product with the query is -inf has no weight, for instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases.operands import Pages, attention, poisoned, quiet_numpy, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.gathered_attention import gathered_attention
from gpu_ops.merge_parts import merge_parts
from gpu_ops.merge_state import merge_state
from gpu_ops.paged_attention import retrieval_attention
from gpu_ops.top_k_candidates import TopKBuffers
from gpu_ops.top_k_tokens import top_k_tokens
from gpu_ops.window_attention import window_attention

INFINITY, NAN = float("inf"), float("nan")
BAD = [NAN, INFINITY, -INFINITY]
KV_HEADS, GROUP_SIZE, HEAD_DIM, KV_LEN, PAGE_TOKENS, SPLITS = 2, 2, 16, 20, 16, 2
HEADS, SM_SCALE = KV_HEADS * GROUP_SIZE, HEAD_DIM**-0.5

# What is wrong with KV head 1 of each row, and in which token; None: in all. Nothing in the last.
EVERY, LAST = slice(None), KV_LEN - 1
ROWS: list[tuple[str, float, Any]] = [
    *(("query", bad, EVERY) for bad in BAD),
    *(("keys", bad, token) for bad in BAD for token in (0, LAST, EVERY)),
    *(("values", bad, token) for bad in BAD for token in (0, LAST)),
    ("nothing", 0.0, EVERY),
]
N = len(ROWS)


@pytest.fixture(autouse=True)
def numbers_that_are_none() -> Iterator[None]:
    with quiet_numpy():
        yield


class Step:
    """`ROWS`, with outputs and scratch to be poisoned."""

    def __init__(self, device: str) -> None:
        rng = new_rng()
        self.device = device
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.query = random(rng, N, HEADS * HEAD_DIM, **options)
        self.kv = random(rng, N, 2, KV_HEADS, KV_LEN, HEAD_DIM, **options)
        # A bad key pulls the first head of a group to inf, the second to -inf.
        query = self.query.view(N, KV_HEADS, GROUP_SIZE, HEAD_DIM)
        query[:, :, 0, 3], query[:, :, 1, 3] = 1.0, -1.0
        for row, (operand, bad, token) in enumerate(ROWS):
            if operand == "query":
                query[row, 1, :, 3] = bad
            elif operand != "nothing":
                self.kv[row, ("keys", "values").index(operand), 1, token, 3] = bad
        self.positions = torch.full((N,), LAST, device=device)
        self.pages = Pages(rng, list(self.kv), PAGE_TOKENS)
        self.heads = torch.arange(KV_HEADS, dtype=torch.int32, device=device)
        self.out, self.lse = self.scratch(N, HEADS * HEAD_DIM), self.scratch(N, HEADS)

    def scratch(self, *shape: int) -> torch.Tensor:
        return poisoned(*shape, dtype=torch.float32, device=self.device)

    def check(self, *, has_lse: bool = True) -> None:
        """Numbers where float64 has numbers, and nowhere else."""
        for row, what in enumerate(ROWS):
            expected, expected_lse = attention(self.query[row], *self.kv[row], SM_SCALE)
            check_numbers(self.out[row], expected, what)
            if has_lse:
                check_numbers(self.lse[row], expected_lse, what)
                assert not self.lse[row].isneginf().any(), what  # that is a part of no tokens


def check_numbers(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), what
    torch.testing.assert_close(actual[finite].double(), expected[finite], rtol=1e-4, atol=1e-5)


def test_window_attention(device: str) -> None:
    step = Step(device)
    window_attention(
        step.query, step.kv, step.positions, sm_scale=SM_SCALE, out=step.out, lse=step.lse
    )
    step.check()


def test_paged_attention(device: str) -> None:
    step = Step(device)
    retrieval_attention(
        step.query,
        step.pages.table,
        step.positions,
        None,
        group_size=GROUP_SIZE,
        page_tokens=PAGE_TOKENS,
        sm_scale=SM_SCALE,
        partial_out=step.scratch(N, HEADS, SPLITS, HEAD_DIM),
        partial_lse=step.scratch(N, HEADS, SPLITS),
        out=step.out,
    )
    step.check(has_lse=False)


def test_retrieval_attention(device: str) -> None:
    """And a head whose scores or lse are wrong selects nothing."""
    step = Step(device)
    max_tokens = step.pages.table.shape[1] * PAGE_TOKENS
    scores = step.scratch(N, KV_HEADS, GROUP_SIZE, max_tokens)
    retrieval_attention(
        step.query,
        step.pages.table,
        step.positions,
        step.heads,
        group_size=GROUP_SIZE,
        page_tokens=PAGE_TOKENS,
        sm_scale=SM_SCALE,
        partial_out=step.scratch(N, HEADS, SPLITS, HEAD_DIM),
        partial_lse=step.scratch(N, HEADS, SPLITS),
        out=step.out,
        lse=step.lse,
        scores=scores,
    )
    step.check()
    counts = torch.full((N, KV_HEADS), 99, dtype=torch.int32, device=device)
    top_k_tokens(
        scores,
        step.lse,
        step.positions,
        step.heads,
        sink_tokens=2,
        recent_tokens=2,
        budget_tokens=8,
        shared=False,
        buffers=TopKBuffers.allocate(N * KV_HEADS, max_tokens, 8, device),
        selection=torch.zeros(N, KV_HEADS, 8, dtype=torch.int32, device=device),
        counts=counts,
    )
    is_wrong = [operand in ("query", "keys") for operand, _, _ in ROWS]
    assert counts.tolist() == [[8, -1 if wrong else 8] for wrong in is_wrong]


def gather(step: Step) -> None:
    """Attend to all tokens, merged into what there is."""
    gathered_attention(
        step.query,
        step.kv,
        torch.full((N, 1), KV_LEN, dtype=torch.int32, device=step.device),
        step.positions,
        step.heads,
        group_size=GROUP_SIZE,
        sink_tokens=0,
        recent_tokens=0,
        sm_scale=SM_SCALE,
        partial_out=step.scratch(N, HEADS, SPLITS, HEAD_DIM),
        partial_lse=step.scratch(N, HEADS, SPLITS),
        out=step.out,
        lse=step.lse,
    )


def test_gathered_attention(device: str) -> None:
    step = Step(device)
    step.lse.fill_(-INFINITY)
    gather(step)
    step.check()


def test_window_that_gathered_tokens_come_to(device: str) -> None:
    """Of rows that are right, so that only the windows are not."""
    step = Step(device)
    step.query[:], step.kv[:] = step.query[-1].clone(), step.kv[-1].clone()
    step.out.zero_()
    step.lse.zero_()
    lse, out = (x.view(N, KV_HEADS, -1)[:, 1] for x in (step.lse, step.out))
    for row, bad in enumerate(BAD):
        lse[row], out[row + 3, 7] = bad, bad
    gather(step)
    finite_lse, finite = lse.isfinite(), out.isfinite()
    assert finite_lse.all(1).tolist() == [False, False] + [True] * (N - 2)  # -inf: no window
    assert not lse.isneginf().any()
    assert not finite[:2].any()
    assert finite[3:6].all(0).tolist() == [d != 7 for d in range(GROUP_SIZE * HEAD_DIM)]
    assert finite[2].all()
    assert finite[6:].all()


@pytest.mark.parametrize(
    ("bad", "operand"), combinations(BAD, ["o_a", "lse_a", "o_b", "lse_b", "both lse"])
)
def test_merge_state(device: str, operand: str, bad: float) -> None:
    shapes = {"o_a": (2, 3 * HEAD_DIM), "lse_a": (2, 3), "o_b": (2, 3 * HEAD_DIM), "lse_b": (2, 3)}
    parts = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, x in parts.items():
        if name == operand or (operand == "both lse" and name.startswith("lse")):
            x.view(2, 3, -1)[1, 2] = bad
    for name, x in parts.items():
        is_host = device == "cuda" and name.endswith("b")
        parts[name] = x.pin_memory() if is_host else x.to(device)
    out = poisoned(2, 3 * HEAD_DIM, dtype=torch.float32, device=device)
    merge_state(**parts, out=out)
    finite = out.view(6, HEAD_DIM).isfinite()
    assert finite[:5].all()
    # -inf is of no tokens, +inf of b the complete answer.
    may_be = "lse" in operand and (bad == -INFINITY or (bad == INFINITY and operand != "lse_a"))
    assert finite[5].all() if may_be else not finite[5].any()


@pytest.mark.parametrize(("bad", "operand"), combinations(BAD, [0, 1, 2, 3]))
def test_merge_parts(device: str, operand: int, bad: float) -> None:
    rng = new_rng()
    shapes = [(2, 3, HEAD_DIM), (2, 3)] * 2
    parts = [random(rng, *shape, dtype=torch.float32, device=device) for shape in shapes]
    before = [part.clone() for part in parts]
    parts[operand][1, 2] = bad
    merge_parts(*parts)
    if operand % 2 and bad == -INFINITY:  # a key of no weight: the other part is the whole
        other = 2 - (operand - 1)
        torch.testing.assert_close(parts[0][1, 2], before[other][1, 2])
        torch.testing.assert_close(parts[1][1, 2], before[other + 1][1, 2])
        return
    wrong = ~parts[0].isfinite()
    assert wrong[1, 2].all()
    assert int(wrong.sum()) == HEAD_DIM
    if operand % 2:
        assert not parts[1][1, 2].isfinite()
