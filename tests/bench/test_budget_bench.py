"""Counts of heads, tokens at equal error and errors by quarter: what must come out exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_models import random_tokens

from offload.bench.budget.drift import measure_drift
from offload.bench.budget.equal_error import tokens_of_equal_error
from offload.bench.budget.head_counts import HeadCounter, fewest_tokens, over_heads
from offload.bench.budget.measure import (
    BudgetMeasurement,
    BudgetSettings,
    check_budgets,
    curve_label,
    measure_budgets,
)
from offload.bench.selection.observer import SeenLayer
from offload.policies import ExactTopK, HardKV, Policy
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel

WINDOW = {"sink_tokens": 2, "recent_tokens": 8, "dense_layers": 1}
SETTINGS = BudgetSettings(length=150, steps=12, sample_every=3, timed_steps=3, generate=8)


def seen(tokens: list[Any], weights: list[list[float]]) -> SeenLayer:
    counts = [len(weights[0]) if x is None else len(x) for x in tokens]
    importance = np.array(weights, np.float32)
    chosen = [None if x is None else np.array(x, np.int32) for x in tokens]
    return SeenLayer(3, importance.shape[1], counts, importance, chosen)


def test_fewest_tokens() -> None:
    weights = np.array([0.1, 0.5, 0.05, 0.3, 0.05])
    assert [fewest_tokens(weights, mass) for mass in (0, 0.4, 0.5, 0.6, 0.95, 1.0, 1.1)] == [
        *(0, 1, 1, 2, 4, 5, 5)
    ]


def test_what_a_head_needed() -> None:
    counter = HeadCounter(0.8, window=(1, 1))
    # Tokens 1 and 3 hold 0.8; with token 0 and 5 in any case, four are attended.
    weights = [0.05, 0.5, 0.05, 0.3, 0.05, 0.05]
    counter.seen(seen([[0, 1, 3, 5], [0, 5], None], [weights] * 3))
    enough, short, every = counter.counted()
    assert (enough.layer, enough.head, short.head) == (3, 0, 1)
    assert enough.true_median == short.true_median == 4
    assert enough.true_without_window == 2
    assert enough.deviation_median == 0
    assert (enough.utilisation, enough.reached_share) == (0.5, 1)
    assert (short.utilisation, short.reached_share) == (1, 0)
    assert short.deviation_median == pytest.approx(0.5)
    assert every.attended_median == 6
    assert every.utilisation == pytest.approx(2 / 6)
    of_all = over_heads([enough, short, every])
    assert of_all["utilisation_of_all"] == pytest.approx((2 + 2 + 2) / (4 + 2 + 6))
    assert of_all["deviation_median"] == pytest.approx(0.5)
    assert over_heads([]) == {}


def test_percentiles_are_of_all_steps() -> None:
    counter = HeadCounter(0.5, window=(0, 1))
    for count in range(1, 22):
        layer = seen([list(range(count))], [[1 / 32] * 32])
        counter.seen(layer if count % 5 == 1 else replace(layer, importance=None))
    (head,) = counter.counted()
    assert (head.attended_p5, head.attended_median, head.attended_p95) == (2, 11, 20)
    assert head.attended_sampled == 11
    # 1, 6, 11, 16 and 21 of 16 tokens at the sampled steps.
    assert head.deviation_median == pytest.approx(5 / 16)
    assert head.reached_share == pytest.approx(2 / 5)


def test_tokens_of_equal_error() -> None:
    fixed = [(512.0, 0.1), (128.0, 0.4)]
    assert tokens_of_equal_error(0.2, fixed) == pytest.approx(256)
    assert tokens_of_equal_error(0.4, fixed) == pytest.approx(128)
    assert tokens_of_equal_error(0.05, fixed) is None
    assert tokens_of_equal_error(0.5, fixed) is None
    assert tokens_of_equal_error(0.2, fixed[:1]) is None
    assert tokens_of_equal_error(0.0, [(512.0, 0.0), (128.0, 0.4)]) is None


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    topk = [ExactTopK(budget_tokens=budget, **WINDOW) for budget in (24, 100)]
    return [make_policy("full"), HardKV(topk[1], 0.9), *topk]


@pytest.fixture(scope="module")
def shared(tiny_folders: dict[str, Path], policies: list[Policy]) -> SharedModel:
    config = runtime_config(dtype="float32", device="cpu", num_threads=1)
    return SharedModel(tiny_folders["llama"], policies, config)


@pytest.fixture(scope="module")
def measured(shared: SharedModel, policies: list[Policy]) -> list[BudgetMeasurement]:
    steps: list[int] = []
    tokens = random_tokens(SETTINGS.text_tokens).tolist()
    rows = measure_budgets(shared, policies, tokens, SETTINGS, on_progress=steps.append)
    assert sum(steps) == len(policies) * SETTINGS.decode_steps
    return rows


def test_full_attention_is_the_reference(measured: list[BudgetMeasurement]) -> None:
    full = measured[0]
    assert full.output_error < 1e-5
    assert full.mass_kept == pytest.approx(1)
    assert full.kl == full.perplexity_change == 0
    assert full.heads == []
    assert full.attended_tokens == pytest.approx(np.mean([151 + 3 * i for i in range(4)]))
    assert all(error is not None and error < 1e-5 for error in full.drift.output_error)
    assert full.drift.attended_tokens == [151.5, 153.5, 155.5, 157.5]


def test_a_share_of_exact_weights_takes_the_true_counts(measured: list[BudgetMeasurement]) -> None:
    share = measured[1]
    assert share.label == "hard_kv of exact_topk sink_tokens=2 recent_tokens=8 dense_layers=1"
    assert (share.top_p, share.needed_top_p, share.budget_tokens) == (0.9, 0.9, 100)
    assert [(head.layer, head.head) for head in share.heads] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for head in share.heads:
        assert head.attended_p5 <= head.attended_median <= head.attended_p95 <= 100
        assert head.true_without_window <= head.true_median
        assert head.reached_share == 1
        assert 0 < head.utilisation <= 1
        # Three query heads have 0.9 of their attention together: none has less than half of its.
        assert head.deviation_p90 < 0.02
    assert share.mass_kept > 0.7


def test_fixed_budgets_are_asked_for_the_settings_share(measured: list[BudgetMeasurement]) -> None:
    _, share, small, large = measured
    assert small.label == large.label
    assert small.needed_top_p == 0.95
    assert {head.attended_median for head in small.heads} == {24.0}
    assert small.over_heads["reached_share"] < large.over_heads["reached_share"]
    assert large.output_error < share.output_error < small.output_error
    tokens = share.attended_tokens / share.tokens_share[small.label]
    at = math.log(share.output_error / large.output_error)
    at /= math.log(small.output_error / large.output_error)
    assert tokens == pytest.approx(100 * (24 / 100) ** at)
    assert small.tokens_share == large.tokens_share == {}


def test_memory_and_time(measured: list[BudgetMeasurement]) -> None:
    for row in measured:
        # 153 tokens lie in one page of each of three layers; a fork has its own copy of it.
        assert row.kv_bytes == 3 * 2 * 256 * 2 * 32 * 4
        assert row.policy_bytes == 0
        assert 0 < row.seconds_p10 <= row.seconds <= row.seconds_p90
        assert row.as_json()["byte_seconds"] == pytest.approx(row.kv_bytes * row.seconds)


def test_drift_compares_with_everything_that_was_written(
    shared: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference keeps its own rows: what a cache loses afterwards is an error."""
    prompt_tokens = random_tokens(SETTINGS.length).tolist()
    runtime = shared.runtimes[0]
    decode, lost = runtime._decoder.decode, 0

    def forgets(hidden: Any, batch: Any, seqs: list[int]) -> Any:
        nonlocal lost
        out = decode(hidden, batch, seqs)
        lost += 1
        if lost == 4:  # after half of the tokens
            for layer_idx in range(runtime.store.num_layers):
                for _, _, pages in runtime.store.page_views(seqs[0], layer_idx):
                    pages[:, 1] = 0  # values
        return out

    monkeypatch.setattr(runtime._decoder, "decode", forgets)
    with shared.read(prompt_tokens) as prompt:
        drift = measure_drift(shared, 0, prompt, 8, sample_every=1, dense_layers=1)
    first, second, third, last = drift.output_error
    assert max(first, second) < 1e-5
    assert min(third, last) > 0.1


def test_what_cannot_be_measured_is_refused() -> None:
    for options, message in (
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"generate": 3}, "generate must be 0 or at least 4, one token a quarter, got 3"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            BudgetSettings(**options)
    topk = make_policy("exact_topk", budget_tokens=150, **WINDOW)
    with pytest.raises(ValueError, match=r"exact_topk: 150 tokens hold .* of 150, .*budget"):
        check_budgets([topk], SETTINGS, 3)
    with pytest.raises(ValueError, match=r"hard_kv: 150 .* lower --max-tokens"):
        check_budgets([HardKV(topk)], SETTINGS, 3)
    with pytest.raises(ValueError, match="dense_layers=1 are all 1 layers of this model"):
        check_budgets([make_policy("exact_topk", budget_tokens=100, **WINDOW)], SETTINGS, 1)


def test_labels() -> None:
    assert curve_label(make_policy("full")) == "full"
    assert curve_label(make_policy("exact_topk", budget_tokens=100)) == "exact_topk"
    assert curve_label(make_policy("hard_kv", top_p=0.9)) == "hard_kv of per_head"
    capped = make_policy("hard_kv", inner="sketch", max_tokens=300)
    assert curve_label(capped) == "hard_kv of sketch max_tokens=300"
