"""Counts of heads, tokens at equal error and errors by quarter: what must come out exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import random_tokens

from offload.bench.budget import timing
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
from offload.bench.eval.perplexity import teacher_forced
from offload.bench.selection.observed_text import observe_text
from offload.bench.selection.observer import SeenLayer
from offload.policies import ExactTopK, HardKV, Policy
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import ReadPrompt, SharedModel
from offload.system.torch_threads import torch_threads

WINDOW = {"sink_tokens": 2, "recent_tokens": 8, "dense_layers": 1}
PAGES_BYTES = 3 * 2 * 256 * 2 * 32 * 4  # a page of each layer
SETTINGS = BudgetSettings(length=150, steps=12, sample_every=3, timed_steps=3, generate=8)


def seen(tokens: list[Any], weights: list[list[float]]) -> SeenLayer:
    counts = [len(weights[0]) if x is None else len(x) for x in tokens]
    importance = np.array(weights)
    chosen = [None if x is None else np.array(x, np.int32) for x in tokens]
    return SeenLayer(3, counts, importance, chosen)


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
    assert (enough.needed_share, enough.reached_share) == (0.5, 1)
    assert (short.needed_share, short.needed_mean, short.reached_share) == (None, None, 0)
    assert short.deviation_median == pytest.approx(0.5)
    assert every.attended_median == 6
    assert every.needed_share == pytest.approx(2 / 6)
    of_all = over_heads([enough, short, every])
    assert of_all["needed_share"] == pytest.approx((2 + 2) / (4 + 6))
    assert of_all["deviation_median"] == pytest.approx(0.5)
    assert over_heads([short])["needed_share"] is None
    assert over_heads([]) == {}


def test_what_is_needed_counts_tokens_of_steps_that_reach_the_share() -> None:
    counter = HeadCounter(0.75, window=(0, 1))
    counter.seen(seen([[0, 1]], [[0.75, 0.25, 0, 0, 0, 0, 0, 0, 0, 0]]))  # one of two
    counter.seen(seen([None], [[0.1] * 10]))  # eight of ten
    counter.seen(seen([[0]], [[0.1] * 10]))  # one is not enough
    (head,) = counter.counted()
    assert (head.attended_reached, head.needed_mean, head.reached_share) == (6, 4.5, 2 / 3)
    assert over_heads([head])["needed_share"] == head.needed_share == 0.75


def test_rounding_decides_nothing() -> None:
    """All of the attention is that of its tokens in whichever order they are added."""
    weights = 10 ** np.random.default_rng(3).uniform(-7, 0, 1000)
    counter = HeadCounter(1.0, window=(10, 20))
    for _ in range(20):
        np.random.default_rng(4).shuffle(weights)
        padded = [*weights.tolist(), *[0.0] * 50, *weights[:20].tolist()]
        counter.seen(seen([list(range(1070)), list(range(1069, -1, -1))], [padded] * 2))
    for head in counter.counted():
        assert (head.true_without_window, head.needed_mean, head.reached_share) == (1020, 1020, 1)


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
    assert tokens_of_equal_error(0.2, [*fixed, (0.0, 1.0)]) == pytest.approx(256)
    assert tokens_of_equal_error(0.5, [*fixed, (0.0, 1.0)]) is None
    assert tokens_of_equal_error(0.0, [(512.0, 0.0), (128.0, 0.4)]) is None


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    topk = [ExactTopK(budget_tokens=budget, **WINDOW) for budget in (24, 100)]
    chunks = make_policy("lychee_cluster", budget_tokens=100, **WINDOW)
    return [make_policy("full"), HardKV(topk[1], 0.9), *topk, chunks]


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
        assert head.needed_share is not None
        assert 0 < head.needed_share <= 1
        # Three query heads have 0.9 of their attention together: none has less than half of its.
        assert head.deviation_p90 < 0.02
    assert share.mass_kept is not None
    assert share.mass_kept > 0.7
    assert share.utilisation == share.attended_tokens / 100 < 1


def test_fixed_budgets_are_asked_for_the_settings_share(measured: list[BudgetMeasurement]) -> None:
    _, share, small, large, _ = measured
    assert small.label == large.label
    assert small.needed_top_p == 0.95
    assert {head.attended_median for head in small.heads} == {24.0}
    assert small.utilisation == 1
    assert small.over_heads["reached_share"] < large.over_heads["reached_share"]
    assert large.output_error < share.output_error < small.output_error
    tokens = share.attended_tokens / share.tokens_share[small.label]
    at = math.log(share.output_error / large.output_error)
    at /= math.log(small.output_error / large.output_error)
    assert tokens == pytest.approx(100 * (24 / 100) ** at)
    assert small.tokens_share == large.tokens_share == {}


def test_memory_and_time(measured: list[BudgetMeasurement]) -> None:
    for row in measured:
        # 162 tokens lie in one page of each of three layers; a fork has its own copy of it.
        assert row.kv_bytes == PAGES_BYTES
        assert (row.policy_bytes > 0) == (row.policy == "lychee_cluster")
        assert 0 < row.seconds_p10 <= row.seconds <= row.seconds_p90
        held = row.kv_bytes + row.policy_bytes
        assert row.as_json()["byte_seconds"] == pytest.approx(held * row.seconds)


def test_memory_of_full_pages(shared: SharedModel, policies: list[Policy]) -> None:
    """A fork has no copy of a page that is full."""
    settings = BudgetSettings(length=256, steps=2, timed_steps=1, generate=0)
    tokens = random_tokens(settings.text_tokens).tolist()
    for row in measure_budgets(shared, policies, tokens, settings):
        assert row.kv_bytes == 2 * PAGES_BYTES


def test_policies_are_timed_in_turns(shared: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, int]] = []
    threads: list[int] = []

    @contextmanager
    def followed(model: SharedModel, index: int, prompt: ReadPrompt) -> Iterator[Any]:
        threads.append(torch.get_num_threads())
        with teacher_forced(model, index, prompt) as decode:
            yield lambda token: (decoded.append((index, token)), decode(token))

    monkeypatch.setattr(timing, "teacher_forced", followed)
    tokens, progress = random_tokens(158).tolist(), []
    with torch_threads(2), shared.read(tokens[:150]) as prompt:
        seconds = timing.step_seconds(shared, prompt, tokens[150:], progress.append)
    assert threads == [2] * 5  # not the one that a generation before it has left
    assert [len(of_policy) for of_policy in seconds] == [4 + 2] * 5
    first = [(index, token) for index in range(5) for token in tokens[150:155]]
    then = [(index, token) for index in (1, 2, 3, 4, 0) for token in tokens[155:]]
    assert decoded == first + then
    assert progress == [5] * 5 + [3] * 5
    assert BudgetSettings(timed_steps=6).timing_tokens == 8


def test_an_error_leaves_nobody_looking_on(shared: SharedModel) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("stop")

    attention = shared.runtimes[0].attention
    with shared.read(random_tokens(20).tolist()) as prompt:
        for run in (
            lambda: observe_text(
                shared, 0, prompt, [1], sample_every=1, dense_layers=2, on_progress=fails
            ),
            lambda: measure_drift(
                shared, 0, prompt, 4, sample_every=1, dense_layers=0, on_progress=fails
            ),
        ):
            with pytest.raises(RuntimeError, match="stop"):
                run()
            assert attention.on_attended is None


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


def test_what_cannot_be_measured_is_refused(shared: SharedModel, policies: list[Policy]) -> None:
    shape = shared.runtimes[0].lean.shape
    for settings in (
        BudgetSettings(length=509, steps=4, timed_steps=1, generate=0),
        BudgetSettings(length=509, steps=1, timed_steps=3, generate=0),
        BudgetSettings(length=509, steps=1, timed_steps=1, generate=4),
    ):
        with pytest.raises(ValueError, match="513 tokens are more than the 512 positions"):
            measure_budgets(shared, policies, [1] * 600, settings)
    for options, message in (
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"generate": 3}, "generate must be 0 or at least 4, one token a quarter, got 3"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            BudgetSettings(**options)
    topk = make_policy("exact_topk", budget_tokens=150, **WINDOW)
    with pytest.raises(ValueError, match=r"exact_topk: 150 tokens hold .* of 150, .*budget"):
        check_budgets([topk], SETTINGS, shape)
    with pytest.raises(ValueError, match=r"hard_kv: 150 .* lower --max-tokens"):
        check_budgets([HardKV(topk)], SETTINGS, shape)
    topk = make_policy("exact_topk", budget_tokens=100, **WINDOW)
    with pytest.raises(ValueError, match="dense_layers=1 are all 1 layers of this model"):
        check_budgets([topk], SETTINGS, replace(shape, num_layers=1))


def test_labels() -> None:
    assert curve_label(make_policy("full")) == "full"
    assert curve_label(make_policy("exact_topk", budget_tokens=100)) == "exact_topk"
    assert curve_label(make_policy("hard_kv", top_p=0.9)) == "hard_kv of per_head"
    assert (
        curve_label(make_policy("hard_kv", inner="sketch", max_tokens=300)) == "hard_kv of sketch"
    )
