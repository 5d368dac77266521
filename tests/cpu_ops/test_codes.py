"""Scores of coded keys against float64 references, over ISA x bits x shape."""

from __future__ import annotations

import numpy as np
import pytest
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.codes import CODE_BLOCK, score_codes

ISAS = native.available_isas()
LEVELS = {1: [-1.0, 1.0], 2: [-1.51, -0.453, 0.453, 1.51]}


def unpack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [tokens, head_dim] of the bytes [blocks, bytes, CODE_BLOCK]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = codes[:, :, None] >> shifts[None, None, :, None] & (1 << bits) - 1
    blocks = parts.reshape(len(codes), -1, CODE_BLOCK)
    return blocks.transpose(0, 2, 1).reshape(len(codes) * CODE_BLOCK, -1)


def make_case(rng: np.random.Generator, group_size: int, head_dim: int, bits: int, n: int):
    blocks = -(-n // CODE_BLOCK)
    return (
        rng.standard_normal((group_size, head_dim), dtype=np.float32),
        np.array(LEVELS[bits], np.float32),
        rng.standard_normal(group_size, dtype=np.float32),
        rng.integers(0, 256, (blocks, head_dim * bits // 8, CODE_BLOCK), dtype=np.uint8),
        rng.random(blocks * CODE_BLOCK, dtype=np.float32) + np.float32(0.1),
    )


def parts_of(query: np.ndarray, levels: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """float64 [group_size, tokens, nibbles]: what each nibble adds to query · levels[code]."""
    bits = len(levels) // 2
    products = query[:, None].astype(np.float64) * levels.astype(np.float64)[unpack(codes, bits)]
    return products.reshape(*products.shape[:2], -1, 4 // bits).sum(3)


@pytest.mark.parametrize(
    ("isa", "bits", "head_dim"), combinations(ISAS, [1, 2], [16, 48, 64, 128, 256, 576])
)
def test_score_codes(isa, bits, head_dim):
    """In the steps of the tables scores are exact, and those are small."""
    rng = new_rng()
    errors = []
    for group_size, n in ((1, 1), (2, 63), (3, 64), (4, 65), (5, 130), (8, 64), (128, 70)):
        query, levels, offsets, codes, scales = make_case(rng, group_size, head_dim, bits, n)
        actual = score_codes(query, levels, offsets, codes, scales, n=n, isa=isa).double().numpy()
        parts = parts_of(query, levels, codes)
        # The values that a nibble may add, by the float64 reference: extremes of its dimensions.
        most = np.abs(query.astype(np.float64)).reshape(group_size, -1, 4 // bits).sum(2)
        most *= levels.max()
        step = 2 * most.max(1) / 127
        rounded = np.rint((parts + most[:, None]) / step[:, None, None]).sum(2)
        tables = step[:, None] * rounded - most.sum(1)[:, None]
        expected = (scales * tables + offsets[:, None]).max(0)[:n]
        exact = (scales * parts.sum(2) + offsets[:, None]).max(0)[:n]
        errors.append(np.abs(actual - expected) - 1e-5 * most.sum(1).max())
        assert (errors[-1] <= 3 * scales[:n] * step.max()).all()
        slack = scales[:n] * step.max() * 0.5 * parts.shape[2]
        assert (np.abs(actual - exact) <= slack + 1e-4).all()
    # An entry close to half a step may be rounded either way.
    assert (np.concatenate(errors) > 0).mean() < 0.05


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_comes_first(isa):
    """A key or query that is not finite is attended to, where attention reports it."""
    query, levels, offsets, codes, scales = make_case(new_rng(), 5, 64, 1, 100)
    expected = score_codes(query, levels, offsets, codes, scales, n=100, isa=isa).numpy()
    broken = scales.copy()
    broken[3], broken[70] = np.nan, np.nan
    scores = score_codes(query, levels, offsets, codes, broken, n=100, isa=isa).numpy()
    assert (scores[[3, 70]] == np.inf).all()
    others = np.delete(np.arange(100), [3, 70])
    np.testing.assert_array_equal(scores[others], expected[others])
    for value in (np.nan, np.inf, -np.inf):
        wrong = query.copy()
        wrong[4, 33] = value
        scores = score_codes(wrong, levels, offsets, codes, scales, n=100, isa=isa).numpy()
        assert (scores == np.inf).all()


@pytest.mark.parametrize("isa", ISAS)
def test_zero_queries_score_their_offset(isa):
    _, levels, offsets, codes, scales = make_case(new_rng(), 3, 64, 2, 80)
    query = np.zeros((3, 64), np.float32)
    scores = score_codes(query, levels, offsets, codes, scales, n=80, isa=isa).numpy()
    np.testing.assert_array_equal(scores, np.full(80, offsets.max()))


def test_shapes_are_checked():
    query, levels, offsets, codes, scales = make_case(new_rng(), 2, 64, 1, 64)
    with pytest.raises(ValueError, match="levels must be 2 or 4, got 3"):
        score_codes(query, np.ones(3, np.float32), offsets, codes, scales, n=64)
    with pytest.raises(ValueError, match=r"codes of 1 bits must be uint8 \[blocks, 8, 64\]"):
        score_codes(query, levels, offsets, codes[:, :7], scales, n=64)
    with pytest.raises(ValueError, match="expected offsets of 2 heads"):
        score_codes(query, levels, offsets[:1], codes, scales, n=64)
    with pytest.raises(ValueError, match="1 blocks have 64 scales and tokens"):
        score_codes(query, levels, offsets, codes, scales, n=65)
