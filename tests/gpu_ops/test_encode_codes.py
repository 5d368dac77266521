"""encode_codes against the codes that the host makes of the same rotated keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.operands import quiet_numpy
from cases.pairwise import pairwise
from cases.seeded import new_rng

from gpu_ops.encode_codes import encode_codes
from offload.policies.sketch.codes import LEVELS, OUTER, encode

BLOCK, HEADS = 64, 2
BAD = [float("nan"), float("inf"), -float("inf"), 1e20, 0.0]  # the square of 1e20 is infinite


@pytest.mark.parametrize(
    ("bits", "head_dim", "n"), pairwise([1, 2], [16, 80, 128, 576], [1, 64, 70, 150])
)
def test_as_on_the_host(device: str, bits: int, head_dim: int, n: int) -> None:
    """Into some blocks of more: squares of small fractions have one sum in any order."""
    rotated = (new_rng().integers(-20, 21, (HEADS, n, head_dim)) / 8).astype(np.float32)
    rotated[1, : len(BAD), 5] = BAD[:n]
    rotated[0, -1] = 0.0
    blocks, width, levels = -(-n // BLOCK), head_dim * bits // 8, LEVELS[bits]
    codes = torch.full((HEADS, blocks + 2, width, BLOCK), 0x77, dtype=torch.uint8, device=device)
    scales = torch.full((HEADS, blocks + 2, BLOCK), -7.0, device=device)
    x, part = torch.from_numpy(rotated).to(device), slice(1, -1)
    with quiet_numpy():
        encode_codes(x, levels.tolist(), float(OUTER), codes[:, part], scales[:, part].flatten(1))
    for i, keys in enumerate(rotated):
        expected = np.zeros(blocks * width * BLOCK, np.uint8)
        of_tokens = np.zeros(blocks * BLOCK, np.float32)
        for token, key in enumerate(keys):
            encode(key, bits, levels, expected, of_tokens, token)
        np.testing.assert_array_equal(codes[i, part].flatten().cpu(), expected)
        np.testing.assert_allclose(scales[i, part].flatten().cpu(), of_tokens, rtol=1e-5)
    assert (codes[:, [0, -1]] == 0x77).all()
    assert (scales[:, [0, -1]] == -7.0).all()


def test_wrong_operands() -> None:
    def refuses(message: str, blocks: int = 2, levels: int = 4, heads: int = HEADS) -> None:
        codes = torch.zeros(heads, blocks, 8, BLOCK, dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            encode_codes(
                torch.zeros(HEADS, 70, 32), [1.0] * levels, 1.0, codes, torch.zeros(HEADS, 128)
            )

    refuses("levels must be 2 or 4, got 3", levels=3)
    refuses(r"codes\[0\] must be \[2, 8, 64\], got \[1, 8, 64\]", blocks=1)
    refuses("codes and scales must be of 2 heads, got 3 and 2", heads=3)
