"""Causal attention of prompts against float64, over shapes and strides."""

from __future__ import annotations

import pytest
import torch
from cases.prefill_cases import reference_attention
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.causal_attention import causal_attention, has_causal_attention
from cpu_ops.worker_pool import WorkerPool

ISA = "avx512_bf16"
needs_isa = pytest.mark.skipif(
    ISA not in native.available_isas(), reason=f"{ISA} is not on this CPU"
)


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).bfloat16()


@needs_isa
@pytest.mark.parametrize(
    ("head_dim", "group_size"), combinations([32, 64, 96, 128, 256], [1, 3, 8])
)
def test_matches_reference(head_dim: int, group_size: int, pool: WorkerPool) -> None:
    """Lengths on both sides of the kernel's rows, panels and blocks of keys."""
    lengths = [(1, 1), (1, 300), (5, 5), (7, 70), (65, 65), (64, 256), (129, 257), (300, 300)]
    for n, kv_len in lengths:
        # Rows of a longer buffer, as the store's; queries with their tokens first in memory.
        keys, values = normal(2, 2, kv_len + 3, head_dim, seed=kv_len)[:, :, 2 : kv_len + 2]
        q = normal(n, 2 * group_size, head_dim, seed=n, scale=2.0).transpose(0, 1)
        o = causal_attention(pool, q, keys, values, head_dim**-0.5, isa=ISA)
        expected, _ = reference_attention(q, keys, values, head_dim**-0.5)
        error = (o.double() - expected).norm() / expected.norm()
        assert error < 4e-3, (n, kv_len)  # bf16 rounds the weights and the output by 2e-3 each


@needs_isa
def test_rows_depend_on_nothing_but_what_they_see(pool: WorkerPool) -> None:
    """Not on later keys, the other queries of a slice or the number of threads: to the bit."""
    keys, values = normal(2, 2, 700, 64, seed=1)
    q = normal(6, 700, 64, seed=2, scale=2.0)
    whole = causal_attention(pool, q, keys, values, 0.125, isa=ISA)
    alone = WorkerPool(1)
    for first, last in [(0, 1), (0, 333), (333, 700), (500, 501)]:
        part = keys[:, :last], values[:, :last]
        o = causal_attention(alone, q[:, first:last], *part, 0.125, isa=ISA)
        assert torch.equal(o, whole[first:last])
    alone.close()
    changed = keys.clone()
    changed[:, 400:] += 5
    o = causal_attention(pool, q, changed, values, 0.125, isa=ISA)
    assert torch.equal(o[:400], whole[:400])
    assert not torch.equal(o[400:], whole[400:])


@needs_isa
@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_scores_of_any_size(scale: float, pool: WorkerPool) -> None:
    keys, values = normal(2, 1, 400, 64, seed=1)
    q = normal(1, 400, 64, seed=2)
    o = causal_attention(pool, q, keys, values, scale, isa=ISA)
    expected, _ = reference_attention(q, keys, values, scale)
    assert (o.double() - expected).norm() / expected.norm() < 4e-3


@needs_isa
def test_nan_stays_in_its_row(pool: WorkerPool) -> None:
    keys, values = normal(2, 1, 40, 64, seed=1)
    q = normal(1, 40, 64, seed=2)
    q[0, 7, 3] = torch.nan
    o = causal_attention(pool, q, keys, values, 0.125, isa=ISA)
    assert o[7].isnan().all()
    assert o[:7].isfinite().all()
    assert o[8:].isfinite().all()


def test_only_where_there_is_a_kernel(pool: WorkerPool) -> None:
    q = normal(2, 4, 64, seed=1)
    for isa in native.available_isas():
        takes = [has_causal_attention(torch.bfloat16, width, isa=isa) for width in (64, 48)]
        assert takes == [isa == ISA, False]
        assert not has_causal_attention(torch.float32, 64, isa=isa)
    with pytest.raises(ValueError, match=r"no kernel for torch\.bfloat16 and head_dim 64"):
        causal_attention(pool, q, q, q, 1.0, isa="scalar")


@needs_isa
def test_refuses_what_does_not_fit(pool: WorkerPool) -> None:
    q, rows = normal(4, 8, 64, seed=1), normal(2, 8, 64, seed=2)
    for keys, values in [
        (rows[:, :7], rows[:, :7]),  # fewer than queries
        (rows, rows[:, :7]),
        (rows, rows.transpose(0, 1).contiguous().transpose(0, 1)),
        (normal(3, 8, 64, seed=3), normal(3, 8, 64, seed=3)),  # not a divisor of 4 heads
        (rows[..., :32], rows[..., :32]),
        (rows.float(), rows.float()),
    ]:
        with pytest.raises(ValueError, match="expected q"):
            causal_attention(pool, q, keys, values, 1.0, isa=ISA)
