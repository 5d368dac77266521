"""Policies measured on a tiny random model: what must come out exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import random_tokens

from offload.bench.eval.bounds import Bound
from offload.bench.eval.evictions import EVICTIONS
from offload.bench.eval.labels import policy_label, policy_options
from offload.bench.quality.measure import (
    QualityMeasurement,
    QualitySettings,
    check_quality,
    exact_topk_of,
    measure_quality,
)
from offload.policies import Policy, Quest, TidalDecode
from offload.policies.registry import available_policies, make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel

REFERENCE = {"recent_tokens": 8, "dense_layers": 1}
SETTINGS = QualitySettings(
    context=150,
    steps=40,
    sample_every=8,
    timed_steps=3,
    exact_topk=make_policy("exact_topk", **REFERENCE),
)


def measured_under(
    folder: Path, policies: list[Policy], settings: QualitySettings, *bounds: Bound, **options: Any
) -> list[QualityMeasurement]:
    policies = [make_policy("full"), *policies]
    config = runtime_config(device="cpu", num_threads=1, page_tokens=16)
    tokens = random_tokens(settings.text_tokens).tolist()
    model = SharedModel(folder, policies, config)
    return measure_quality(model, policies, tokens, settings, bounds, **options)


@pytest.fixture(scope="module")
def measured(tiny_folders: dict[str, Path]) -> dict[str, QualityMeasurement]:
    policies = [
        make_policy("exact_topk", budget_tokens=40, **REFERENCE),
        make_policy("streaming_llm", budget_tokens=40, dense_layers=1),
    ]
    steps: list[int] = []
    labels: list[str] = []
    rows = measured_under(
        tiny_folders["llama"],
        policies,
        SETTINGS,
        on_policy=labels.append,
        on_progress=steps.append,
    )
    assert sum(steps) == 3 * SETTINGS.decode_steps
    assert [label.split()[0] for label in labels] == ["full", "exact_topk", "streaming_llm"]
    return {row.policy: row for row in rows}


def test_full_attention_is_perfect(measured: dict[str, QualityMeasurement]) -> None:
    full = measured["full"]
    assert full.mass_kept == pytest.approx(1.0)
    assert full.overlap == 1.0
    assert full.output_error < 1e-5
    assert full.kl == 0.0
    assert full.perplexity_change == 0.0
    assert full.selecting_share == 0.0
    assert full.attended_tokens == pytest.approx(np.mean([151 + 8 * i for i in range(5)]))
    assert full.budget_tokens is full.mass_of_topk is full.candidate_share is None
    assert full.jaccard is full.window_hit is None


def test_exact_topk_is_the_best_selection(measured: dict[str, QualityMeasurement]) -> None:
    topk, streaming = measured["exact_topk"], measured["streaming_llm"]
    assert topk.overlap == pytest.approx(1.0, abs=2e-3)  # equal weights may be told apart
    assert topk.mass_of_topk == pytest.approx(1.0, abs=1e-4)
    assert topk.attended_tokens == streaming.attended_tokens == 40
    assert topk.selecting_share == streaming.selecting_share == 1.0
    assert topk.candidate_share == pytest.approx(1.0)
    assert streaming.candidate_share == 0.0
    assert 0 < streaming.mass_kept < topk.mass_kept < 1
    assert streaming.mass_of_topk < 1
    assert streaming.overlap < 0.7
    assert 0 < topk.output_error < streaming.output_error
    assert 0 < topk.kl < streaming.kl
    assert 0 < topk.jaccard < topk.window_hit <= 1
    assert streaming.jaccard is None  # everything it attends to is the recent window
    assert all(row.tokens_per_second > 0 for row in measured.values())


def test_perplexity_is_that_of_one_forward_pass(
    measured: dict[str, QualityMeasurement], stock_models: dict[str, Any]
) -> None:
    text = random_tokens(SETTINGS.text_tokens)
    with torch.no_grad():
        logits = stock_models["llama"](text[None]).logits[0].double()
    first = SETTINGS.context  # the first token that is decoded
    rows = slice(first, first + SETTINGS.steps)
    predicted = text[first + 1 : first + SETTINGS.steps + 1]
    loss = torch.nn.functional.cross_entropy(logits[rows], predicted)
    assert measured["full"].perplexity == pytest.approx(float(loss.exp()), rel=1e-3)


def test_within_a_bound(tiny_folders: dict[str, Path]) -> None:
    """On the same tokens: with room for nearly all of them little is lost."""
    settings = QualitySettings(context=300, steps=60, sample_every=3, timed_steps=3)
    bounds = [*(Bound(0.6, eviction) for eviction in EVICTIONS), Bound(0.95, "rkv")]
    steps: list[int] = []
    full, *rows = measured_under(
        tiny_folders["llama"], [], settings, *bounds, on_progress=steps.append
    )
    assert sum(steps) == (1 + len(bounds)) * settings.decode_steps
    assert [row.label for row in rows] == [bound.label("full") for bound in bounds]
    *few, most = rows
    for row in few:
        assert row.policy == "full"
        assert row.budget_tokens < most.budget_tokens < settings.text_tokens
        assert row.output_error > most.output_error > 0
        assert row.kl > most.kl > 0
        assert row.attended_tokens is row.mass_kept is row.candidate_share is None
    # Each drops, or merges, other tokens, or merges them in another way.
    assert len({row.kl for row in few}) == len(EVICTIONS)
    assert full.budget_tokens is None


@pytest.mark.parametrize("name", [name for name in available_policies() if name != "full"])
def test_every_policy_can_be_measured(name: str, tiny_folders: dict[str, Path]) -> None:
    settings = QualitySettings(
        context=300,
        steps=40,
        sample_every=20,
        timed_steps=2,
        exact_topk=make_policy("exact_topk", dense_layers=1),
    )
    full, row = measured_under(tiny_folders["llama"], [small(name)], settings)
    assert row.policy == name
    assert 0 < row.attended_tokens <= full.attended_tokens
    assert 0 <= row.output_error < 10
    assert row.kl >= 0
    if row.selecting_share:
        assert 0 < row.mass_kept <= 1
        assert 0 <= row.overlap <= 1


def small(name: str) -> Policy:
    options: dict[str, Any] = {"budget_tokens": 200}
    if "dense_layers" in type(make_policy(name)).option_names():
        options["dense_layers"] = 1
    return make_policy(name, **options)


def test_what_cannot_be_measured_is_refused_before_loading() -> None:
    policies = [make_policy("exact_topk", budget_tokens=150)]
    with pytest.raises(ValueError, match=r"the text has 193 tokens, but context=150 \+ steps=40"):
        check_quality(policies, SETTINGS.text_tokens - 1, SETTINGS, 512)
    with pytest.raises(ValueError, match="are 193 tokens, but this model has 192 positions"):
        check_quality(policies, SETTINGS.text_tokens, SETTINGS, 192)
    with pytest.raises(ValueError, match="exact_topk: budget_tokens=150 holds the whole context"):
        check_quality(policies, SETTINGS.text_tokens, SETTINGS, 512)
    capped = make_policy("hard_kv", budget_tokens=100, max_step_bytes=99999)
    with pytest.raises(ValueError, match=r"max_step_bytes=99999 of hard_kv is turned .* give max_"):
        check_quality([capped], SETTINGS.text_tokens, SETTINGS, 512)
    with pytest.raises(ValueError, match="sample_every must be at least 1, got 0"):
        QualitySettings(sample_every=0)


def test_labels_and_references() -> None:
    assert policy_label(make_policy("full")) == "full"
    assert policy_label(make_policy("streaming_llm", budget_tokens=200)) == "streaming_llm"
    policy = make_policy("exact_topk", budget_tokens=100, recent_tokens=8)
    assert policy_label(policy) == "exact_topk recent_tokens=8"
    tidal = TidalDecode(Quest(budget_tokens=100, page_tokens=32))
    assert policy_label(tidal) == "tidal_decode inner=quest page_tokens=32 chunks=False"
    assert policy_options(tidal)["budget_tokens"] == 100
    given = {"recent_tokens": [8], "sink_tokens": [2, 4], "budget_tokens": [9], "alpha": [0.5]}
    assert exact_topk_of(given) == make_policy("exact_topk", recent_tokens=8)
