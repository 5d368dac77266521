"""Operands of more than 2**31 elements, of which next to nothing is touched."""

from __future__ import annotations

import pytest
import torch
from cases.operands import assert_close, attention, poisoned, random
from cases.seeded import new_rng

from gpu_ops.gathered_attention import gathered_attention
from gpu_ops.rotate import rotate_tokens
from gpu_ops.window_attention import window_attention

HEAD_DIM = 128
TOKENS = 2**22 + 5  # of which keys and values of two rows are 2**31 elements


@pytest.fixture
def rows(device: str) -> torch.Tensor:
    """float16 [2, 2, 1, TOKENS, HEAD_DIM] of memory that nobody has written."""
    return torch.empty(2, 2, 1, TOKENS, HEAD_DIM, dtype=torch.float16, device=device)


def test_window(device: str, rows: torch.Tensor) -> None:
    rng = new_rng()
    options = {"dtype": torch.float16, "device": device}
    query = random(rng, 2, HEAD_DIM, **options)
    rows[1, :, 0, :3] = random(rng, 2, 3, HEAD_DIM, **options)
    out = poisoned(2, HEAD_DIM, dtype=torch.float32, device=device)
    lse = poisoned(2, 1, dtype=torch.float32, device=device)
    positions = torch.tensor([-1, 2], device=device)
    window_attention(query, rows, positions, sm_scale=0.1, out=out, lse=lse)
    expected, _ = attention(query[1], *rows[1, :, :, :3], 0.1)
    assert_close(out[1], expected, 1e-3)


def test_gathered(device: str, rows: torch.Tensor) -> None:
    rng = new_rng()
    options = {"dtype": torch.float16, "device": device}
    query = random(rng, 2, HEAD_DIM, **options)
    rows[1, :, 0, :3] = random(rng, 2, 3, HEAD_DIM, **options)
    out = poisoned(2, HEAD_DIM, dtype=torch.float32, device=device)
    gathered_attention(
        query,
        rows,
        torch.full((2, 1), 3, dtype=torch.int32, device=device),
        torch.tensor([-1, 9], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        group_size=1,
        sink_tokens=0,
        recent_tokens=0,
        sm_scale=0.1,
        partial_out=poisoned(2, 1, 1, HEAD_DIM, dtype=torch.float32, device=device),
        partial_lse=poisoned(2, 1, 1, dtype=torch.float32, device=device),
        out=out,
        lse=torch.full((2, 1), float("-inf"), device=device),
    )
    expected, _ = attention(query[1], *rows[1, :, :, :3], 0.1)
    assert_close(out[1], expected, 1e-3)


def test_rotation_of_heads_far_apart(device: str) -> None:
    """As a view of heads over tokens has them; a head's stride alone still fits an int32."""
    rng = new_rng()
    num_heads, head_stride = 5, 2**29 + 64
    memory = torch.empty(num_heads * head_stride, dtype=torch.float16, device=device)
    x = memory.as_strided((2, num_heads, HEAD_DIM), (HEAD_DIM, head_stride, 1))
    x.copy_(random(rng, *x.shape, dtype=torch.float16, device=device))
    cos, sin = random(rng, 2, 2, HEAD_DIM, dtype=torch.float16, device=device)
    near = x.contiguous()
    assert torch.equal(rotate_tokens(x, cos, sin), rotate_tokens(near, cos, sin))
