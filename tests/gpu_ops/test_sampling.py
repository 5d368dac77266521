"""greedy_tokens and sample_tokens against a sort in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.operands import DTYPES, quiet_numpy, random, sampling_buffers
from cases.seeded import new_rng
from cases.slowly import combinations, slow_but

from gpu_ops import sampling
from gpu_ops.greedy import CHUNK, greedy_tokens
from gpu_ops.sampling import sample_tokens, sample_tokens_reference

VOCAB_SIZES = [1, 50, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


@pytest.fixture(autouse=True)
def whole_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time by operations, so it gets a chunk in one tile."""
    if not torch.cuda.is_available() and "tiles" not in request.node.name:
        monkeypatch.setattr(sampling, "_TILE", CHUNK)


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    uniform: list[float],
) -> torch.Tensor:
    n, device = len(uniform), str(logits.device)
    out = torch.full((n,), -1, device=device)
    sample_tokens(
        logits.expand(n, -1).contiguous(),
        temperature=torch.full((n,), temperature, device=device),
        top_k=torch.full((n,), top_k, device=device),
        top_p=torch.full((n,), top_p, device=device),
        uniform=torch.tensor(uniform, device=device),
        out=out,
        buffers=sampling_buffers(n + 1, logits.shape[1], device),
    )
    return out.cpu()


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """float64 probabilities of a row, as transformers' warpers leave them; ties are all kept."""
    x = logits[0].double().cpu().numpy() / temperature
    order = np.sort(x)[::-1]
    if top_k and top_k < len(x):
        x = np.where(x < order[top_k - 1], -np.inf, x)
    probabilities = np.exp(x - x.max())
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.sort(probabilities)[::-1]
        last = min(np.searchsorted(order.cumsum(), top_p), len(x) - 1)
        probabilities[probabilities < order[last]] = 0
        probabilities /= probabilities.sum()
    return probabilities


@pytest.mark.parametrize(("dtype", "vocab_size"), combinations(DTYPES, VOCAB_SIZES))
def test_greedy(device: str, dtype: torch.dtype, vocab_size: int) -> None:
    logits = random(new_rng(), 3, vocab_size, dtype=dtype, device=device)
    logits[1] = logits[1].abs().neg()
    logits[2] = -1.0
    expected = [int(np.argmax(row)) for row in logits.double().cpu().numpy()]
    out = torch.full((3,), -1, device=device)
    greedy_tokens(logits, out, sampling_buffers(4, vocab_size, device))
    assert out.tolist() == expected
    assert expected[2] == 0


def test_the_first_of_equals(device: str) -> None:
    logits = torch.zeros(1, 3 * CHUNK, dtype=torch.bfloat16, device=device)
    logits[0, [CHUNK + 7, CHUNK + 9, 2 * CHUNK + 1]] = 5.0
    out = torch.full((1,), -1, device=device)
    greedy_tokens(logits, out, sampling_buffers(1, 3 * CHUNK, device))
    assert out.tolist() == [CHUNK + 7]
    assert sample(logits, temperature=0.0, uniform=[0.99]).tolist() == [CHUNK + 7]


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "temperature", "top_k", "top_p"),
    combinations(
        [
            (torch.float32, 50),
            (torch.float16, 50),
            (torch.bfloat16, 50),
            (torch.bfloat16, CHUNK),
            (torch.bfloat16, 2 * CHUNK + 1),
        ],
        [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 20, 0.5), (0.5, 10**6, 0.999)],
    ),
)
def test_draws_where_transformers_would(
    device: str, dtype: torch.dtype, vocab_size: int, temperature: float, top_k: int, top_p: float
) -> None:
    rng = new_rng()
    logits = random(rng, 1, vocab_size, dtype=dtype, device=device, scale=2.0)
    probabilities = kept(logits, temperature, top_k, top_p)
    uniform = rng.random(4, dtype=np.float32).tolist()
    tokens = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform)
    sums = probabilities.cumsum()
    for token, u in zip(tokens.tolist(), uniform, strict=True):
        assert probabilities[token] > 0
        assert sums[token] - probabilities[token] - 1e-5 <= u <= sums[token] + 1e-5


def test_tiles_of_a_chunk(device: str) -> None:
    logits = torch.from_numpy(new_rng().permutation(CHUNK) / CHUNK)[None].float().to(device)
    tokens = sample(logits, temperature=1e6, top_k=3, top_p=0.99, uniform=[0.0, 0.999])
    assert tokens.tolist() == logits[0].topk(3).indices.sort().values[[0, -1]].tolist()


@pytest.mark.parametrize("top_k", [1, 2, 7, 11, 12])
def test_top_k_keeps_as_many(device: str, top_k: int) -> None:
    rng = new_rng()
    logits = torch.from_numpy(rng.permutation(12) / 12.0 - 0.5)[None].float().to(device)
    uniform = ((np.arange(top_k) + 0.5) / top_k).tolist()
    tokens = sample(logits, temperature=1e6, top_k=top_k, uniform=uniform)  # all but equal
    assert tokens.tolist() == sorted(logits[0].topk(top_k).indices.tolist())


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.3])
def test_a_small_top_p_keeps_the_largest(device: str, top_p: float) -> None:
    logits = torch.full((1, CHUNK + 9), -3.0, device=device)
    logits[0, CHUNK + 3] = 9.0
    assert sample(logits, top_p=top_p, uniform=[0.0, 0.999]).tolist() == [CHUNK + 3] * 2


def test_rows_have_their_own_options(device: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 4, device=device)
    out = torch.full((4,), -1, device=device)
    sample_tokens(
        logits,
        temperature=torch.tensor([0.0, 1.0, 1.0, 1e6], device=device),
        top_k=torch.tensor([3, 1, 0, 0], device=device),
        top_p=torch.tensor([0.5, 1.0, 0.01, 1.0], device=device),
        uniform=torch.tensor([0.9, 0.9, 0.9, 0.9], device=device),
        out=out,
        buffers=sampling_buffers(8, 4, device),
    )
    assert out.tolist() == [1, 1, 1, 3]


def test_masked_tokens_are_never_drawn(device: str) -> None:
    logits = torch.full((1, 60), float("-inf"), device=device)
    logits[0, [7, 30]] = 0.0
    assert sample(logits, uniform=[0.0, 0.49, 0.51, 0.99999994]).tolist() == [7, 7, 30, 30]
    assert sample(logits, top_k=5, top_p=0.99, uniform=[0.0, 0.6]).tolist() == [7, 30]


@pytest.mark.parametrize("dtype", slow_but(DTYPES, torch.bfloat16))
def test_logits_that_are_no_numbers(device: str, dtype: torch.dtype) -> None:
    """No token, where transformers draws none or an argmax finds NaN."""
    nan, inf = float("nan"), float("inf")
    vocab_size = CHUNK + 9
    logits = torch.zeros(8, vocab_size, dtype=dtype, device=device)
    logits[0, 5] = logits[1, CHUNK + 3] = nan
    logits[2, [7, CHUNK + 2]] = torch.tensor([inf, nan], dtype=dtype, device=device)
    logits[3] = nan
    logits[4, [CHUNK + 1, CHUNK + 4]] = inf
    logits[5] = -inf
    logits[6, :-1] = -inf
    buffers = sampling_buffers(8, vocab_size, device)
    out = torch.full((8,), 99, device=device)
    greedy_tokens(logits, out, buffers)
    assert out.tolist() == [-1, -1, -1, -1, CHUNK + 1, 0, vocab_size - 1, 0]
    for temperature, top_k, top_p, drawn in (
        (0.0, 0, 1.0, [CHUNK + 1, 0, vocab_size - 1, 0]),
        (0.7, 0, 1.0, [-1, -1, vocab_size - 1, 0]),
        (0.7, 3, 0.9, [-1, -1, vocab_size - 1, 0]),
    ):
        with quiet_numpy():
            sample_tokens(
                logits,
                temperature=torch.full((8,), temperature, device=device),
                top_k=torch.full((8,), top_k, device=device),
                top_p=torch.full((8,), top_p, device=device),
                uniform=torch.zeros(8, device=device),
                out=out,
                buffers=buffers,
            )
        assert out.tolist() == [-1, -1, -1, -1, *drawn]


@pytest.mark.cuda
def test_in_a_graph_at_full_size() -> None:
    vocab_size = 128256
    logits = random(new_rng(), 4, vocab_size, dtype=torch.bfloat16, device="cuda", scale=3.0)
    uniform = torch.zeros(4, device="cuda")
    out, expected = (torch.full((4,), -1, device="cuda") for _ in range(2))
    options = {
        "temperature": torch.tensor([0.0, 1.0, 0.8, 1.2], device="cuda"),
        "top_k": torch.tensor([0, 0, 50, 1000], device="cuda"),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 0.5], device="cuda"),
    }
    buffers = sampling_buffers(4, vocab_size, "cuda")

    def run() -> None:
        sample_tokens(logits, **options, uniform=uniform, out=out, buffers=buffers)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    agree = 0
    for _ in range(8):
        uniform.uniform_()
        graph.replay()
        sample_tokens_reference(logits, **options, uniform=uniform, out=expected)
        agree += int((out == expected).sum())
    assert agree >= 30  # sums in float32 may fall on the other side of a boundary


def test_wrong_operands() -> None:
    buffers = sampling_buffers(1, 8, "cpu")
    tokens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits must be \[2, 8\], got \[2, 9\]"):
        greedy_tokens(torch.zeros(2, 9), tokens, buffers)
    with pytest.raises(ValueError, match="the sampling buffers are for 1 rows, got 2"):
        greedy_tokens(torch.zeros(2, 8), tokens, buffers)
