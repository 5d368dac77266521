"""Operands and expectations of the operators' tests."""

from __future__ import annotations

import numpy as np
import torch

from gpu_ops.greedy import SamplingBuffers
from gpu_ops.layout import allocate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Of one rounding to the dtype, relative L2, with room for a few of them.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(
    rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: str, scale: float = 1.0
) -> torch.Tensor:
    """Normally distributed values, already rounded to `dtype`."""
    values = torch.from_numpy(scale * rng.standard_normal(shape, dtype=np.float32))
    return values.to(device=device, dtype=dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """An output that must be written: NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def sampling_buffers(max_rows: int, vocab_size: int, device: torch.device | str) -> SamplingBuffers:
    """Scratch of the operators on logits."""
    layout = SamplingBuffers.layout(max_rows, vocab_size)
    return SamplingBuffers(vocab_size, **allocate(layout, device, torch.empty))


def quiet_numpy() -> np.errstate:
    """What a GPU computes without a word warns in the interpreter, and warnings are errors."""
    return np.errstate(invalid="ignore", divide="ignore", over="ignore")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative L2 against a float64 expectation; NaN fails."""
    assert expected.dtype == torch.float64
    error = torch.linalg.vector_norm(actual.double().cpu() - expected.cpu())
    scale = torch.linalg.vector_norm(expected.cpu())
    assert error <= tolerance * scale, f"relative L2 {float(error / scale):.3g} > {tolerance:.3g}"


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sm_scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 o [num_qo_heads * head_dim] and lse [num_qo_heads] of one row's query.

    Args:
        q: [num_qo_heads * head_dim].
        keys, values: [num_kv_heads, kv_len, head_dim].
        sinks: [num_qo_heads], logits beside those of the tokens; o is less by their share.
        softcap: of scores; 0: they are not capped.
    """
    num_kv_heads, _, head_dim = keys.shape
    grouped = q.double().view(num_kv_heads, -1, head_dim)
    scores = grouped @ keys.double().transpose(1, 2) * sm_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(-1)
    if sinks is None:
        return (scores.softmax(-1) @ values.double()).flatten(), lse.flatten()
    joined = torch.cat([scores, sinks.to(scores).view(*lse.shape, 1)], dim=-1).softmax(-1)
    return (joined[..., :-1] @ values.double()).flatten(), lse.flatten()


class Pages:
    """Pages of several rows, in shuffled order; what no token was written to is NaN.

    Args:
        kv: per row keys and values [2, num_kv_heads, kv_len, head_dim], or keys alone [1, ..], or
            None for no pages.
    """

    def __init__(
        self, rng: np.random.Generator, kv: list[torch.Tensor | None], page_tokens: int
    ) -> None:
        first = next(x for x in kv if x is not None)
        parts, num_kv_heads, _, head_dim = first.shape
        counts = [0 if x is None else -(-x.shape[2] // page_tokens) for x in kv]
        shape = (sum(counts), parts, num_kv_heads, page_tokens, head_dim)
        empty = -128 if first.dtype == torch.int8 else float("nan")
        self.pages = torch.full(shape, empty, dtype=first.dtype, device=first.device)
        page_bytes = self.pages[0].numel() * self.pages.element_size()
        order = rng.permutation(sum(counts)).tolist()
        self.table = torch.zeros(len(kv), max(counts), dtype=torch.int64)
        for row, x in enumerate(kv):
            for page_idx in range(counts[row]):
                page_id = order.pop()
                self.table[row, page_idx] = self.pages.data_ptr() + page_id * page_bytes
                tokens = x[:, :, page_idx * page_tokens : (page_idx + 1) * page_tokens]
                self.pages[page_id, :, :, : tokens.shape[2]] = tokens
        self.table = self.table.to(first.device)
