"""Metrics of selections against values computed by hand and in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offload.bench.quality.metrics import (
    ReferenceBudget,
    Stability,
    exact_attention,
    importance_of_units,
    kl_divergence,
    largest,
    negative_log_likelihood,
    relative_error,
    selection_quality,
)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_exact_attention_is_that_of_float64() -> None:
    query, keys, values = torch.randn(6, 32), torch.randn(2, 50, 32), torch.randn(2, 50, 32)
    weights, out = exact_attention(query, keys, values, 0.3)
    for head in range(6):
        kv_head = head // 3
        scores = 0.3 * (keys[kv_head].double().numpy() @ query[head].double().numpy())
        expected = np.exp(scores - scores.max())
        expected /= expected.sum()
        np.testing.assert_allclose(weights[head].numpy(), expected, rtol=1e-4)
        expected_out = expected @ values[kv_head].double().numpy()
        np.testing.assert_allclose(out[head].numpy(), expected_out, rtol=1e-4, atol=1e-6)
    importance = importance_of_units(weights, 2)
    torch.testing.assert_close(importance[1], weights[3] + weights[4] + weights[5])
    assert torch.equal(importance_of_units(weights, 6), weights)


def test_quality_by_hand() -> None:
    #             sinks        to choose from       recent
    importance = [9.0, 5.0, 4.0, 1.0, 3.0, 0.5, 2.0, 1.5]
    reference = ReferenceBudget(budget_tokens=6, sink_tokens=2, recent_tokens=2)
    quality = selection_quality(np.array(importance), tokens(0, 1, 2, 5, 6, 7), reference)
    assert quality.mass_kept == pytest.approx((4 + 0.5 + 2 + 1.5) / 12)
    assert quality.mass_of_topk == pytest.approx((4 + 0.5 + 2 + 1.5) / (4 + 3 + 2 + 1.5))
    assert quality.overlap == 0.5  # {2, 5} against {2, 4}
    assert quality.recall == 5 / 6  # 5 is there instead of 4
    best = selection_quality(np.array(importance), tokens(0, 1, 2, 4, 6, 7), reference)
    assert best.overlap == best.mass_of_topk == 1.0
    everything = selection_quality(np.array(importance), np.arange(8, dtype=np.int32), reference)
    assert everything.mass_kept == everything.overlap == 1.0
    assert everything.mass_of_topk > 1.0


def test_quality_where_nothing_is_chosen() -> None:
    reference = ReferenceBudget(budget_tokens=4, sink_tokens=2, recent_tokens=2)
    quality = selection_quality(np.ones(10), tokens(0, 1, 8, 9), reference)
    assert quality.overlap is None
    assert quality.mass_kept == 0.25
    assert quality.mass_of_topk == 1.0
    # A cache that the sinks and the recent window cover.
    assert selection_quality(np.ones(3), tokens(0, 1, 2), reference).mass_kept == 1.0


def test_largest() -> None:
    values = np.random.default_rng(1).permutation(100).astype(np.float32)
    assert set(values[largest(values, 7)]) == set(range(93, 100))
    assert len(largest(values, 0)) == 0
    assert set(largest(values, 200)) == set(range(100))


def test_relative_error() -> None:
    exact = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(exact, exact) == 0.0
    assert relative_error(torch.tensor([[3.0, 1.0], [0.0, 4.0]]), exact) == pytest.approx(0.2)


def test_divergence_and_likelihood_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    reference, other = (torch.tensor([x, x]).log() + 7.0 for x in (p, q))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    torch.testing.assert_close(
        kl_divergence(other, reference), torch.full((2,), expected, dtype=torch.float64)
    )
    assert kl_divergence(other, other).tolist() == [0.0, 0.0]
    loss = negative_log_likelihood(other, torch.tensor([0, 2]))
    torch.testing.assert_close(loss, -torch.tensor([0.25, 0.5], dtype=torch.float64).log())


def test_stability_by_hand() -> None:
    stability = Stability(capacity_tokens=10, window=2)
    steps = [(1, 2, 3), (2, 3, 4), (4, 5, 6), (1, 5, 6, 7)]
    for step in steps:
        stability.update(tokens(*step))
    assert stability.jaccard == pytest.approx((2 / 4 + 1 / 5 + 2 / 5) / 3)
    # {4,5,6} in {1,2,3,4}; {1,5,6,7} in {2,3,4,5,6}
    assert stability.window_hit == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_stability_against_sets() -> None:
    generator = np.random.default_rng(2)
    window, history = 5, []
    stability = Stability(capacity_tokens=60, window=window)
    jaccard, hits = [], []
    for step in range(40):
        chosen = set(generator.choice(60, generator.integers(1, 30), replace=False).tolist())
        if step >= 1:
            jaccard.append(len(chosen & history[-1]) / len(chosen | history[-1]))
        if step >= window:
            hits.append(len(chosen & set().union(*history[-window:])) / len(chosen))
        history.append(chosen)
        stability.update(tokens(*chosen))
    assert stability.jaccard == pytest.approx(np.mean(jaccard))
    assert stability.window_hit == pytest.approx(np.mean(hits))


def test_steps_without_a_selection_interrupt_stability() -> None:
    stability = Stability(capacity_tokens=5, window=2)
    assert stability.jaccard is None
    assert stability.window_hit is None
    for step in [(1, 2), (1, 2), (), (1, 2)]:
        stability.update(tokens(*step))
    assert stability.jaccard == 1.0  # only the second step has one right before it
    assert stability.window_hit is None
    for _ in range(3):
        stability.update(tokens(1, 3))
    # Before the last three steps came {1, 2}, so 3 is new to the first of them, which counts
    # neither: only one selection had been made since the gap.
    assert stability.window_hit == 1.0
    assert stability.jaccard == pytest.approx((1 + 1 / 3 + 1 + 1) / 4)
