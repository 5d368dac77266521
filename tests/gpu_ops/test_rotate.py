"""rotate_tokens against transformers, bit by bit."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, random
from cases.seeded import new_rng
from cases.slowly import combinations
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gpu_ops.rotate import rotate_tokens


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim"), combinations(DTYPES, [(1, 16), (3, 48), (8, 128)])
)
def test_rounds_as_transformers(device: str, dtype: torch.dtype, num_heads: int, head_dim: int):
    """Rows lie apart, as the queries in a projection of several."""
    rng = new_rng()
    x = random(rng, 5, num_heads + 2, head_dim, dtype=dtype, device=device)[:, 1:-1]
    cos, sin = random(rng, 2, 5, head_dim, dtype=dtype, device=device)
    heads_first = x[None].transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    rotated = rotate_tokens(x, cos, sin)
    assert rotated.is_contiguous()
    assert torch.equal(rotated, expected[0].transpose(0, 1))


def test_wrong_operands() -> None:
    table = torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"sin must be \[2, 16\], got \[1, 16\]"):
        rotate_tokens(torch.zeros(2, 1, 16), table, table[:1])
    with pytest.raises(ValueError, match="rows of x must be contiguous"):
        rotate_tokens(torch.zeros(16, 1, 2).transpose(0, 2), table, table)
