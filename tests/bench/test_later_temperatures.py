"""Temperatures that are solved for again while tokens are generated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.tiny_models import random_tokens

from offload.bench.budget import drift
from offload.bench.budget.drift import measure_drift
from offload.bench.budget.measure import BudgetSettings
from offload.bench.eval.perplexity import teacher_forced
from offload.policies import ExactTopK, HardKV, Quest
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import ReadPrompt, SharedModel

LENGTH, GENERATED = 300, 140
WINDOW: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 8, "dense_layers": 1}


@pytest.fixture(scope="module")
def shared(tiny_folders: dict[str, Path]) -> SharedModel:
    quest = Quest(budget_tokens=200, page_tokens=4, **WINDOW)
    policies = [HardKV(quest, 0.9), HardKV(ExactTopK(budget_tokens=200, **WINDOW), 0.9)]
    config = runtime_config(dtype="float32", device="cpu", num_threads=1)
    return SharedModel(tiny_folders["llama"], policies, config)


def betas_of(model: SharedModel, tokens: list[int]) -> list[np.ndarray]:
    """Of each layer, as the policy solves for them after a prompt."""
    states = model.runtimes[0].attention.states
    with model.read(tokens) as prompt, model.continued(0, prompt) as cache:
        arrays = states.ensure(cache.seqs[0], len(tokens) + 1)
        return [layer["betas"].copy() if layer else np.empty(0) for layer in arrays.layers]


def test_they_are_what_a_prompt_of_all_tokens_would_get(
    shared: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer that selects: its keys and queries are those of full attention."""
    tokens = random_tokens(LENGTH).tolist()

    @contextmanager
    def followed(model: SharedModel, index: int, prompt: ReadPrompt) -> Iterator[Any]:
        with teacher_forced(model, index, prompt) as decode:
            yield lambda token: (tokens.append(token), decode(token))[1]

    monkeypatch.setattr(drift, "teacher_forced", followed)
    settings: dict[str, Any] = {"sample_every": 50, "dense_layers": 1, "temperature_every": 70}
    with shared.read(tokens[:LENGTH]) as prompt:
        found = measure_drift(shared, 0, prompt, GENERATED, **settings).temperatures
    monkeypatch.undo()
    assert [later.tokens for later in found] == [70, 140]
    before = betas_of(shared, tokens[:LENGTH])
    for later in found:
        dense, first, second = later.of_layers
        expected = np.log(before[1] / betas_of(shared, tokens[: LENGTH + later.tokens])[1])
        assert len(expected) == 2
        assert np.abs(expected).min() > 1e-3  # another text has other temperatures
        assert first == pytest.approx(np.exp(expected.mean()), rel=1e-3)
        assert dense is None
        assert second is not None
        assert second > 0
        assert later.solved == 1


def test_policies_that_have_none(shared: SharedModel) -> None:
    """By weights, with no time for a window, or where nobody asks."""
    settings: dict[str, Any] = {"sample_every": 50, "dense_layers": 1}
    with shared.read(random_tokens(LENGTH).tolist()) as prompt:
        for index, tokens, every in ((1, 64, 64), (0, 63, 64), (0, 64, 0)):
            found = measure_drift(
                shared, index, prompt, tokens, temperature_every=every, **settings
            )
            assert found.temperatures == []


def test_fewer_tokens_than_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature_every must be at least 64, .* got 63"):
        BudgetSettings(temperature_every=63)
