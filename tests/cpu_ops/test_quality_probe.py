"""What selections keep of the exact attention mass, against float64, over ISA x dtype x shape."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from cases.attention_cases import Cache, attend, random_queries
from cases.chosen_tokens import Chosen, ChosenPerQueryHead
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.worker_pool import WorkerPool
from offload.policies.registry import make_policy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Scores of bf16 dot products are rounded on some ISAs.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}
GROUP_SIZE = 3


def reference_mass(cache: Cache, queries: torch.Tensor, selection: list[np.ndarray]) -> np.ndarray:
    """float64 [num_kv_heads], the mean over each group of the weights of what was selected."""
    num_heads = cache.store.num_kv_heads
    everything = [np.arange(cache.kv_len)] * num_heads
    _, _, weights = cache.reference(queries, cache.layer_idx, everything)
    chosen = [tokens for tokens in selection for _ in range(len(weights) // len(selection))]
    kept = [of_head[tokens].sum() for of_head, tokens in zip(weights, chosen, strict=True)]
    return np.reshape(kept, (num_heads, -1)).mean(1)


@pytest.mark.parametrize(
    ("isa", "dtype", "per_query_head"), combinations(native.available_isas(), DTYPES, [False, True])
)
def test_mass_kept_matches_reference(isa, dtype, per_query_head, pool):
    rng = new_rng()
    for kv_len, head_dim, page_tokens in ((65, 48, 16), (2051, 128, 256)):
        cache = Cache.random(
            rng, kv_len=kv_len, head_dim=head_dim, dtype=dtype, page_tokens=page_tokens
        )
        num_units = cache.store.num_kv_heads * (GROUP_SIZE if per_query_head else 1)
        counts = rng.integers(1, kv_len - 1, num_units)
        selection = [
            np.append(np.sort(rng.choice(kv_len - 1, n, replace=False)), kv_len - 1) for n in counts
        ]
        policy = (ChosenPerQueryHead if per_query_head else Chosen)(
            budget_tokens=kv_len - 1, dense_layers=1, selection=selection
        )
        attention = cache.attention(pool, GROUP_SIZE, policy, isa)
        attention.start_probe(1.0, seed=1)
        queries = random_queries(rng, 1, attention.num_qo_heads, head_dim, dtype)
        attend(attention, [cache.seq], [kv_len], queries)
        probes, sums = attention.probed()
        assert probes.tolist() == [[0, 0], [1, 1]]
        assert attention.num_probed() == 2
        expected = reference_mass(cache, queries, selection)
        np.testing.assert_allclose(sums[1], expected, atol=TOLERANCE[dtype])


def test_a_share_is_drawn_whatever_the_threads_and_without_touching_the_output(pool):
    rng = new_rng()
    cache = Cache.random(rng, kv_len=300, dtype=torch.float32)
    policy = make_policy("streaming_llm", budget_tokens=64, dense_layers=1)
    queries = random_queries(rng, 5, 4, 64, torch.float32)
    one_thread = WorkerPool(1)
    attentions = [cache.attention(threads, 2, policy) for threads in (pool, one_thread, pool)]
    for attention in attentions[:2]:
        attention.start_probe(0.1, seed=3)
    for _ in range(400):
        results = [
            attend(attention, [cache.seq] * 5, [300, 64, 299, 298, 297], queries)
            for attention in attentions
        ]
        for out, lse in results[1:]:
            np.testing.assert_array_equal(out, results[0][0])
            np.testing.assert_array_equal(lse, results[0][1])
    (probes, sums), others, off = (attention.probed() for attention in attentions)
    np.testing.assert_array_equal(probes, others[0])
    np.testing.assert_allclose(sums, others[1], rtol=1e-6)
    assert not off[0].any()
    # Of 400 steps, 4 rows beyond the budget and 2 heads; within 5 standard deviations.
    assert abs(probes.sum() - 320) < 5 * (3200 * 0.1 * 0.9) ** 0.5
    assert abs(probes[1, 0] - probes[1, 1]) < 5 * (320 * 0.9) ** 0.5
    one_thread.close()


def test_scores_that_overflow_are_left_out(pool):
    """A key that the policy passes by, and that is too large for a softmax."""
    cache = Cache.random(new_rng(), kv_len=300, dtype=torch.float32)
    policy = make_policy("streaming_llm", budget_tokens=64, dense_layers=1)
    attention = cache.attention(pool, 2, policy)
    attention.start_probe(1.0, seed=1)
    key = int(cache.store.page_table(cache.seq)[1][0]) + 99 * 64 * 4  # token 99 of head 0
    ctypes.memmove(key, np.full(64, 3e38, np.float32).ctypes.data, 64 * 4)
    out, _ = attend(attention, [cache.seq], [300], torch.ones(1, 4 * 64))
    assert np.isfinite(out).all()
    probes, sums = attention.probed()
    assert probes.tolist() == [[0, 0], [0, 1]]
    assert 0 < sums[1, 1] < 1
