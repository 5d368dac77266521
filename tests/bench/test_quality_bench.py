"""Policies measured on a tiny random model: what must come out exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import random_tokens
from offload.bench.selection.measure import (
    SelectionMeasurement,
    SelectionSettings,
    check_settings,
    measure_selection,
    policy_label,
    policy_options,
    reference_of,
)
from offload.bench.selection.shared_prefill import SharedPrefill

from offload import OffloadedModel
from offload.policies import Policy, Quest, TidalDecode
from offload.policies.registry import available_policies, make_policy

REFERENCE = {"recent_tokens": 8, "dense_layers": 1}
SETTINGS = SelectionSettings(
    context=150, steps=40, sample_every=8, timed_steps=3, reference_options=(*REFERENCE.items(),)
)


def loader(folder: Path) -> Any:
    return lambda policy: OffloadedModel.from_pretrained(folder, policy=policy, num_threads=1)


@pytest.fixture(scope="module")
def measured(tiny_folders: dict[str, Path]) -> dict[str, SelectionMeasurement]:
    policies = [
        make_policy("exact_topk", budget_tokens=40, **REFERENCE),
        make_policy("streaming_llm", budget_tokens=40, dense_layers=1),
    ]
    steps: list[int] = []
    labels: list[str] = []
    rows = measure_selection(
        loader(tiny_folders["llama"]),
        policies,
        random_tokens(SETTINGS.text_tokens).tolist(),
        SETTINGS,
        on_policy=labels.append,
        on_progress=steps.append,
    )
    assert sum(steps) == 3 * SETTINGS.decode_steps
    assert [label.split()[0] for label in labels] == ["full", "exact_topk", "streaming_llm"]
    return {row.policy: row for row in rows}


def test_full_attention_is_perfect(measured: dict[str, SelectionMeasurement]) -> None:
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


def test_exact_topk_is_the_best_selection(measured: dict[str, SelectionMeasurement]) -> None:
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
    measured: dict[str, SelectionMeasurement], stock_models: dict[str, Any]
) -> None:
    text = random_tokens(SETTINGS.text_tokens)
    with torch.no_grad():
        logits = stock_models["llama"](text[None]).logits[0].double()
    first = SETTINGS.context  # the first token that is decoded
    rows = slice(first, first + SETTINGS.steps)
    predicted = text[first + 1 : first + SETTINGS.steps + 1]
    loss = torch.nn.functional.cross_entropy(logits[rows], predicted)
    assert measured["full"].perplexity == pytest.approx(float(loss.exp()), rel=1e-3)


@pytest.mark.parametrize("name", [name for name in available_policies() if name != "full"])
def test_every_policy_can_be_measured(name: str, tiny_folders: dict[str, Path]) -> None:
    policy = small(name)
    settings = SelectionSettings(
        context=300,
        steps=40,
        sample_every=20,
        timed_steps=2,
        reference_options=(("dense_layers", 1),),
    )
    full, row = measure_selection(
        loader(tiny_folders["llama"]),
        [policy],
        random_tokens(settings.text_tokens).tolist(),
        settings,
    )
    assert row.policy == name
    assert 0 < row.attended_tokens <= full.attended_tokens
    assert 0 <= row.output_error < 10
    assert row.kl >= 0
    if row.selecting_share:
        assert 0 < row.mass_kept <= 1
        assert 0 <= row.overlap <= 1


@pytest.mark.parametrize("name", available_policies())
def test_a_shared_prefill_changes_nothing(name: str, tiny_folders: dict[str, Path]) -> None:
    text = random_tokens(1, 330)
    policy = make_policy("full") if name == "full" else small(name)
    shared = SharedPrefill()
    shared.attach(loader(tiny_folders["llama"])(make_policy("full")))(text[:, :300])
    logits = []
    for attach in (shared.attach, lambda model: model):
        model = attach(loader(tiny_folders["llama"])(policy))
        cache = model.new_cache()
        logits.append([model(text[:, :300], past_key_values=cache, logits_to_keep=1).logits])
        for i in range(300, 330):
            logits[-1].append(model(text[:, i : i + 1], past_key_values=cache).logits)
    for copied, computed in zip(*logits, strict=True):
        torch.testing.assert_close(copied, computed, rtol=1e-5, atol=1e-5)


def small(name: str) -> Policy:
    options: dict[str, Any] = {"budget_tokens": 200}
    if "dense_layers" in type(make_policy(name)).option_names():
        options["dense_layers"] = 1
    return make_policy(name, **options)


def test_a_fresh_text_and_budget_are_checked_before_loading() -> None:
    policies = [make_policy("exact_topk", budget_tokens=150)]
    with pytest.raises(ValueError, match=r"the text has 193 tokens, but context=150 \+ steps=40"):
        check_settings(policies, SETTINGS.text_tokens - 1, SETTINGS)
    with pytest.raises(ValueError, match="exact_topk: budget_tokens=150 holds the whole context"):
        check_settings(policies, SETTINGS.text_tokens, SETTINGS)
    capped = make_policy("hard_kv", budget_tokens=100, max_step_bytes=99999)
    with pytest.raises(ValueError, match=r"max_step_bytes=99999 of hard_kv is turned .* give max_"):
        check_settings([capped], SETTINGS.text_tokens, SETTINGS)
    with pytest.raises(ValueError, match="sample_every must be at least 1, got 0"):
        SelectionSettings(sample_every=0)


def test_more_text_than_positions_is_refused(tiny_folders: dict[str, Path]) -> None:
    settings = SelectionSettings(context=500, steps=10, timed_steps=3)
    with pytest.raises(ValueError, match="are 513 tokens, but this model has 512 positions"):
        measure_selection(loader(tiny_folders["llama"]), [], list(range(1, 515)), settings)


def test_labels_and_references() -> None:
    assert policy_label(make_policy("full")) == "full"
    assert policy_label(make_policy("streaming_llm", budget_tokens=200)) == "streaming_llm"
    policy = make_policy("exact_topk", budget_tokens=100, recent_tokens=8)
    assert policy_label(policy) == "exact_topk recent_tokens=8"
    tidal = TidalDecode(Quest(budget_tokens=100, page_tokens=32))
    assert policy_label(tidal) == "tidal_decode inner=quest page_tokens=32 chunks=False"
    assert policy_options(tidal)["budget_tokens"] == 100
    reference = reference_of(policy, SETTINGS)
    assert reference is not None
    assert (reference.budget_tokens, reference.sink_tokens, reference.recent_tokens) == (100, 4, 8)
    assert reference.selectable(50) == (4, 42)
    assert reference_of(make_policy("full"), SETTINGS) is None
