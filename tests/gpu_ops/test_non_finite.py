"""NaN and infinity in every operand of every kernel show in what comes out, and stay in their rows.

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

from gpu_ops.chunk_clusters import chunk_boxes
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gathered_attention import gathered_attention
from gpu_ops.gemv import gemv
from gpu_ops.merge_parts import merge_parts
from gpu_ops.merge_state import merge_state
from gpu_ops.paged_attention import retrieval_attention
from gpu_ops.rms_norm import add_rms_norm
from gpu_ops.rope_publish import rope_publish
from gpu_ops.rotate import rotate_tokens
from gpu_ops.silu_mul import activate, silu_mul
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

    def check(self, *, has_lse: bool = True, softcap: float = 0.0) -> None:
        """Numbers where float64 has numbers, and nowhere else."""
        for row, what in enumerate(ROWS):
            of_row = attention(self.query[row], *self.kv[row], SM_SCALE, softcap=softcap)
            expected, expected_lse = of_row
            check_numbers(self.out[row], expected, what)
            if has_lse:
                check_numbers(self.lse[row], expected_lse, what)
                assert not self.lse[row].isneginf().any(), what  # that is a part of no tokens


def check_numbers(actual: torch.Tensor, expected: torch.Tensor, what: object = None) -> None:
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), what
    torch.testing.assert_close(
        actual[finite].double(), expected[finite].double(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_window_attention(device: str, softcap: float) -> None:
    step = Step(device)
    window_attention(
        step.query,
        step.kv,
        step.positions,
        sm_scale=SM_SCALE,
        out=step.out,
        lse=step.lse,
        softcap=softcap,
    )
    step.check(softcap=softcap)


def retrieve(step: Step, heads: torch.Tensor | None, **outputs: torch.Tensor) -> None:
    retrieval_attention(
        step.query,
        step.pages.table,
        step.positions,
        heads,
        group_size=GROUP_SIZE,
        page_tokens=PAGE_TOKENS,
        sm_scale=SM_SCALE,
        partial_out=step.scratch(N, HEADS, SPLITS, HEAD_DIM),
        partial_lse=step.scratch(N, HEADS, SPLITS),
        out=step.out,
        **outputs,
    )


def test_paged_attention(device: str) -> None:
    step = Step(device)
    retrieve(step, None)
    step.check(has_lse=False)


def test_retrieval_attention(device: str) -> None:
    """And a head whose scores or lse are wrong selects nothing."""
    step = Step(device)
    max_tokens = step.pages.table.shape[1] * PAGE_TOKENS
    scores = step.scratch(N, KV_HEADS, GROUP_SIZE, max_tokens)
    retrieve(step, step.heads, lse=step.lse, scores=scores)
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
    """Rows are right, so that only the windows are not."""
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


# The operators that attend to nothing.

each_bad = pytest.mark.parametrize("bad", BAD)


def normal(device: str, *shape: int) -> torch.Tensor:
    return random(new_rng(), *shape, dtype=torch.float32, device=device)


def check_spoilt(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Something is no number, as expected."""
    assert not expected.isfinite().all()
    check_numbers(actual, expected)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@each_bad
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_rms_norm(device: str, operand: int, bad: float) -> None:
    residual, delta, weight = operands = [normal(device, *s) for s in ((3, 48), (3, 48), (48,))]
    operands[operand][..., 5 if operand == 2 else slice(None)].view(-1)[-1] = bad
    expected = rms_norm(residual + delta, weight)
    out = torch.zeros_like(residual)
    add_rms_norm(residual, delta, weight, 1e-6, out)
    check_spoilt(out, expected)


@each_bad
@pytest.mark.parametrize("side", [0, 1])
def test_silu_mul(device: str, side: int, bad: float) -> None:
    both = normal(device, 2, 2, 40)
    both[1, side, 7] = bad
    gate, up = both.double().unbind(1)
    expected = gate / (1 + (-gate).exp()) * up
    out = poisoned(2, 40, dtype=torch.float32, device=device)
    silu_mul(both.view(2, 80), out)
    check_spoilt(out, expected)
    gate, up = (x.contiguous() for x in both.unbind(1))
    activate(gate, up)
    check_spoilt(gate, expected)


@each_bad
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_rotate(device: str, operand: int, bad: float) -> None:
    x, cos, sin = operands = [normal(device, *s) for s in ((2, 3, 32), (2, 32), (2, 32))]
    operands[operand][1, ..., 20] = bad
    check_spoilt(rotate_tokens(x, cos, sin), rotate(x, cos[:, None], sin[:, None]))


@each_bad
@pytest.mark.parametrize("operand", ["q", "k", "v", "k_norm"])
def test_rope_publish(device: str, operand: str, bad: float) -> None:
    """Into everything that it writes: two query heads, one key and one value head."""
    heads, cos, sin = normal(device, 2, 4, 32), normal(device, 2, 32), normal(device, 2, 32)
    q_norm, k_norm = normal(device, 2, 32)
    if operand == "k_norm":
        k_norm[20] = bad
    else:
        heads[1, {"q": 1, "k": 2, "v": 3}[operand], 20] = bad
    q, k = rms_norm(heads[:, :2], q_norm), rms_norm(heads[:, 2:3], k_norm)
    q, k = (rotate(x, cos[:, None], sin[:, None]) for x in (q, k))
    query = poisoned(2, 64, dtype=torch.float32, device=device)
    host_kv = torch.full((2, 2, 1, 32), float("nan"))
    host_kv = host_kv.pin_memory() if device == "cuda" else host_kv
    window = poisoned(2, 2, 1, 4, 32, dtype=torch.float32, device=device)
    rope_publish(
        heads.view(2, -1),
        cos,
        sin,
        torch.tensor([0, 2], device=device),
        num_kv_heads=1,
        query=query,
        host_kv=host_kv,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=1e-6,
        window=window,
        sink_tokens=1,
    )
    if device == "cuda":
        torch.cuda.synchronize()
    expected = torch.cat((q, k, heads[:, 3:].double()), dim=1)
    check_spoilt(torch.cat((query.view(2, 2, 32), host_kv[:, :, 0].to(device)), dim=1), expected)
    in_window = torch.stack((window[0, :, 0, 0], window[1, :, 0, 2]))
    assert torch.equal(in_window.isfinite(), expected[:, 2:].isfinite())


@each_bad
@pytest.mark.parametrize(
    ("operand", "glu"), combinations(["x", "weight", "bias", "residual", "norm"], [False, True])
)
def test_gemv(device: str, glu: bool, operand: str, bad: float) -> None:
    num_out, num_in = 9, 50
    x, residual = normal(device, 1, num_in), normal(device, 1, num_out)
    weight, bias = normal(device, num_out * (1 + glu), num_in), normal(device, num_out * (1 + glu))
    norm = normal(device, num_in)
    spoiled = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm": norm}[operand]
    spoiled.view(-1)[3] = bad
    y = rms_norm(x, norm) @ weight.double().T + bias
    if glu:
        gate, up = y.chunk(2, dim=-1)
        y = gate / (1 + (-gate).exp()) * up
    out = poisoned(1, num_out, dtype=torch.float32, device=device)
    gemv(x, weight, out, bias=bias, norm=(norm, 1e-6), glu=glu, residual=residual)
    check_spoilt(out, y + residual)


@each_bad
@pytest.mark.parametrize("side", [0, 1])
def test_gather_rows(device: str, side: int, bad: float) -> None:
    kv = normal("cpu", 2, 2, 20, 16)
    kv[side, 1, 17, 3] = bad
    pages = Pages(new_rng(), [kv], 16)
    held = pages.pages.pin_memory() if device == "cuda" else pages.pages
    table = (pages.table - pages.pages.data_ptr() + held.data_ptr()).to(device)
    out = torch.zeros(1, 2, 2, 4, 16, device=device)
    gather_rows(
        torch.tensor([[[0, 5, 9, 17, 19]]], dtype=torch.int32, device=device)
        .expand(1, 2, 5)
        .clone(),
        torch.full((1, 2), 5, dtype=torch.int32, device=device),
        table,
        torch.tensor([19], device=device),
        torch.arange(2, dtype=torch.int32, device=device),
        num_kv_heads=2,
        page_tokens=16,
        sink_tokens=0,
        recent_tokens=1,
        out=out,
    )
    check_spoilt(out[0].cpu(), kv[:, :, [0, 5, 9, 17]].double())


@each_bad
def test_chunk_boxes(device: str, bad: float) -> None:
    keys = normal(device, 2, 40, 16)
    keys[1, 12, 3] = bad
    starts = torch.tensor([0, 10, 20, 40], device=device)
    points, centres, _ = chunk_boxes(keys, starts)
    wrong = torch.zeros(2, 3, dtype=torch.bool, device=device)
    wrong[1, 1] = True
    for found in (points, centres):
        assert torch.equal(~found.isfinite().all(-1), wrong)
