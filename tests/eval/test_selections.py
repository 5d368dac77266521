"""What is selected, judged: numbers by hand, and policies on a tiny random model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import random_tokens

from offload.bench.eval.forced import kl_divergence
from offload.bench.eval.perplexity import Window, measure_window
from offload.bench.eval.selections import ReferenceBudget, largest, selection_quality
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_quality_by_hand() -> None:
    #             sinks        to choose from       recent
    importance = [9.0, 5.0, 4.0, 1.0, 3.0, 0.5, 2.0, 1.5]
    reference = ReferenceBudget(budget_tokens=6, sink_tokens=2, recent_tokens=2)
    quality = selection_quality(np.array(importance), tokens(0, 1, 2, 5, 6, 7), reference)
    assert quality.mass_kept == pytest.approx((4 + 0.5 + 2 + 1.5) / 12)
    assert quality.mass_of_topk == pytest.approx((4 + 0.5 + 2 + 1.5) / (4 + 3 + 2 + 1.5))
    assert quality.overlap == 0.5  # {2, 5} against {2, 4}
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


def test_divergence_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    reference, other = (torch.tensor([x, x]).log() + 7.0 for x in (p, q))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    torch.testing.assert_close(
        kl_divergence(other, reference), torch.full((2,), expected, dtype=torch.float64)
    )
    assert kl_divergence(other, other).tolist() == [0.0, 0.0]


def judged(folder: Path, policies: list[Policy], steps: int) -> dict[str, dict[str, Any]]:
    """What a window's judged steps say, by policy."""
    policies = [make_policy("full"), *policies]
    config = runtime_config(device="cpu", num_threads=1, page_tokens=16)
    model = SharedModel(folder, policies, config)
    window = Window(300, 0, random_tokens(300 + steps + 1).tolist())
    names = [policy.name for policy in policies]
    return measure_window(model, names, window, judged_every=8)["answers"]


def test_exact_topk_is_the_best_selection(tiny_folders: dict[str, Path]) -> None:
    options = {"budget_tokens": 64, "dense_layers": 1}
    topk = make_policy("exact_topk", recent_tokens=16, **options)
    found = judged(tiny_folders["llama"], [topk, make_policy("streaming_llm", **options)], 40)
    full, topk, streaming = found.values()
    assert full["mass_kept"] == pytest.approx(1.0)
    assert full["overlap"] == 1.0
    assert full["output_error"] < 1e-5
    assert full["mass_of_topk"] is None
    assert topk["overlap"] == pytest.approx(1.0, abs=2e-3)  # equal weights may be told apart
    assert topk["mass_of_topk"] == pytest.approx(1.0, abs=1e-4)
    assert 0 < streaming["mass_kept"] < topk["mass_kept"] < 1
    assert streaming["mass_of_topk"] < 1
    assert 0 < topk["output_error"] < streaming["output_error"]
    assert 0 < topk["kl"] < streaming["kl"]
    assert streaming["scored_tokens"] == 0 < topk["scored_tokens"]
    for answer in found.values():
        assert (answer["tokens"], answer["decoded_tokens"]) == (40, 35)  # the others were judged
        assert answer["decode_seconds"] > 0


@pytest.mark.parametrize("name", [name for name in available_policies() if name != "full"])
def test_every_policy_can_be_judged(name: str, tiny_folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"budget_tokens": 200}
    if "dense_layers" in type(make_policy(name)).option_names():
        options["dense_layers"] = 1
    _, answer = judged(tiny_folders["llama"], [make_policy(name, **options)], 18).values()
    assert 0 <= answer["output_error"] < 10
    if answer["mass_kept"] is not None:
        assert 0 < answer["mass_kept"] <= 1
    if answer["overlap"] is not None:
        assert 0 <= answer["overlap"] <= 1
