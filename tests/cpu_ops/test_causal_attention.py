"""Causal attention of prompts against float64, over shapes and strides."""

from __future__ import annotations

import pytest
import torch
from cases.prefill_cases import reference_attention
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.causal_attention import causal_attention, has_causal_attention
from cpu_ops.worker_pool import WorkerPool

# Relative L2: the output is rounded, and with dot products of bf16 the weights are, too.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
KERNELS = [
    (isa, dtype)
    for isa in native.available_isas()
    for dtype in TOLERANCE
    if has_causal_attention(dtype, 64, isa=isa)
]
each_kernel = pytest.mark.parametrize(("isa", "dtype"), KERNELS, ids=str)


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim", "group_size"),
    combinations(KERNELS, [32, 48, 64, 96, 128, 256], [1, 3, 8]),
    ids=str,
)
def test_matches_reference(
    isa: str, dtype: torch.dtype, head_dim: int, group_size: int, pool: WorkerPool
) -> None:
    """Lengths on both sides of the kernel's rows, panels and blocks of keys."""
    if not has_causal_attention(dtype, head_dim, isa=isa):
        pytest.skip(f"dot products of bf16 take 32 columns at a time, not {head_dim}")
    lengths = [(1, 1), (1, 300), (5, 5), (7, 70), (65, 65), (64, 256), (129, 257), (300, 300)]
    for n, kv_len in lengths:
        # Rows of a longer buffer, as the store's; queries with their tokens first in memory.
        rows = normal(2, 2, kv_len + 3, head_dim, seed=kv_len, dtype=dtype)
        keys, values = rows[:, :, 2 : kv_len + 2]
        q = normal(n, 2 * group_size, head_dim, seed=n, scale=2.0, dtype=dtype).transpose(0, 1)
        o = causal_attention(pool, q, keys, values, head_dim**-0.5, isa=isa)
        expected, _ = reference_attention(q, keys, values, head_dim**-0.5)
        error = (o.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], (n, kv_len)
        sinks = normal(len(q), seed=4, scale=4.0, dtype=torch.float32)
        for window, of_heads in ((1, None), (40, None), (290, None), (40, sinks), (kv_len, sinks)):
            o = causal_attention(
                pool, q, keys, values, head_dim**-0.5, window=window, sinks=of_heads, isa=isa
            )
            last = torch.arange(kv_len - n, kv_len)[:, None]
            seen = (torch.arange(kv_len) <= last) & (torch.arange(kv_len) > last - window)
            k, v = (x.double().repeat_interleave(group_size, 0) for x in (keys, values))
            scores = (q.double() @ k.mT * head_dim**-0.5).masked_fill(~seen, -torch.inf)
            if of_heads is not None:
                column = of_heads.double().view(-1, 1, 1).expand(-1, n, 1)
                scores = torch.cat([scores, column], -1)
            expected = (scores.softmax(-1)[..., :kv_len] @ v).transpose(0, 1)
            error = (o.double() - expected).norm() / expected.norm()
            assert error < TOLERANCE[dtype], (n, kv_len, window)


@each_kernel
def test_rows_depend_on_nothing_but_what_they_see(
    isa: str, dtype: torch.dtype, pool: WorkerPool
) -> None:
    """Not on later keys, the other queries of a slice or the number of threads: to the bit."""
    keys, values = normal(2, 2, 700, 64, seed=1, dtype=dtype)
    q = normal(6, 700, 64, seed=2, scale=2.0, dtype=dtype)
    whole = causal_attention(pool, q, keys, values, 0.125, isa=isa)
    alone = WorkerPool(1)
    for first, last in [(0, 1), (0, 333), (333, 700), (500, 501)]:
        part = keys[:, :last], values[:, :last]
        o = causal_attention(alone, q[:, first:last], *part, 0.125, isa=isa)
        assert torch.equal(o, whole[first:last])
    alone.close()
    changed = keys.clone()
    changed[:, 400:] += 5
    o = causal_attention(pool, q, changed, values, 0.125, isa=isa)
    assert torch.equal(o[:400], whole[:400])
    assert not torch.equal(o[400:], whole[400:])


@each_kernel
@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_scores_of_any_size(isa: str, dtype: torch.dtype, scale: float, pool: WorkerPool) -> None:
    keys, values = normal(2, 1, 400, 64, seed=1, dtype=dtype)
    q = normal(1, 400, 64, seed=2, dtype=dtype)
    o = causal_attention(pool, q, keys, values, scale, isa=isa)
    expected, _ = reference_attention(q, keys, values, scale)
    # Scores of 1e5 are exact to 1e-2 in float32, and so are their weights.
    tolerance = max(TOLERANCE[dtype], 1e-2 if scale > 1 else 0)
    assert (o.double() - expected).norm() / expected.norm() < tolerance


@each_kernel
def test_nan_stays_in_its_row(isa: str, dtype: torch.dtype, pool: WorkerPool) -> None:
    keys, values = normal(2, 1, 40, 64, seed=1, dtype=dtype)
    q = normal(1, 40, 64, seed=2, dtype=dtype)
    q[0, 7, 3] = torch.nan
    o = causal_attention(pool, q, keys, values, 0.125, isa=isa)
    assert o[7].isnan().all()
    assert o[:7].isfinite().all()
    assert o[8:].isfinite().all()
    sinks = torch.tensor([torch.nan])
    assert causal_attention(pool, q, keys, values, 0.125, sinks=sinks, isa=isa).isnan().all()
    for sink in (-torch.inf, -1e38):  # no share, to the bit
        found = causal_attention(pool, q, keys, values, 0.125, sinks=sinks.fill_(sink), isa=isa)
        assert found.nan_to_num(9.0).equal(o.nan_to_num(9.0))
    with pytest.raises(ValueError, match=r"sinks must be torch.float32 \[1\]"):
        causal_attention(pool, q, keys, values, 0.125, sinks=torch.ones(2), isa=isa)


def test_only_where_there_is_a_kernel(pool: WorkerPool) -> None:
    """On vectors of any width."""
    for isa in native.available_isas():
        is_vector = isa not in ("scalar", "neon")
        assert has_causal_attention(torch.bfloat16, 64, isa=isa) == is_vector
        assert has_causal_attention(torch.float32, 48, isa=isa) == is_vector
        assert not has_causal_attention(torch.float32, 40, isa=isa)
        assert not has_causal_attention(torch.float32, 608, isa=isa)  # of scratch for 576
    q = normal(2, 4, 64, seed=1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"no kernel for torch\.bfloat16 and head_dim 64"):
        causal_attention(pool, q, q, q, 1.0, isa="scalar")


@pytest.mark.skipif(not KERNELS, reason="this CPU has no vectors that there is a kernel for")
def test_refuses_what_does_not_fit(pool: WorkerPool) -> None:
    isa, dtype = KERNELS[0]
    q, rows = normal(4, 8, 64, seed=1, dtype=dtype), normal(2, 8, 64, seed=2, dtype=dtype)
    three = normal(3, 8, 64, seed=3, dtype=dtype)
    for keys, values in [
        (rows[:, :7], rows[:, :7]),  # fewer than queries
        (rows, rows[:, :7]),
        (rows, rows.transpose(0, 1).contiguous().transpose(0, 1)),
        (three, three),  # not a divisor of 4 heads
        (rows[..., :32], rows[..., :32]),
        (rows.double(), rows.double()),
    ]:
        with pytest.raises(ValueError, match="expected q"):
            causal_attention(pool, q, keys, values, 1.0, isa=isa)
