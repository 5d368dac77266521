"""`quality_probe`: what a model says of itself while it decodes."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, INLINE, STREAM, greedy, load, small
from cases.inside import decoder_of, runtime_of
from cases.seeded import new_rng
from cases.tiny_models import random_tokens

from offload.bench.eval.selections import ReferenceBudget, selection_quality
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.measuring.synthetic.exact_attention import ExactAttention
from offload.policies.registry import available_policies, make_policy
from offload.runtime.config import runtime_config
from offload.runtime.quality import Quality, mass_bounds
from offload.selection.policy import DENSE, RETRIEVE, REUSE

SPARSE = [name for name in available_policies() if name != "full"]
NEW_TOKENS = 20


class ExactMass:
    """The mass kept by each KV head, step and layer, as the selection bench's observer has it."""

    def __init__(self, attention: DecodeAttention, sm_scale: float) -> None:
        self._attention, self._sm_scale = attention, sm_scale
        self.kept: dict[tuple[int, int], list[float]] = {}
        attention.on_attended = self._see

    def _see(self, layer_idx: int, step: Any, query: torch.Tensor, out: torch.Tensor) -> None:
        attention, policy = self._attention, self._attention.policy
        store, kv_len = attention.store, int(step.kv_lens[0])
        if not attention.sparse_layers[layer_idx] or kv_len <= policy.budget_tokens:
            return
        row = query[0, : attention.num_qo_heads * store.head_dim]
        at = (store, step.seqs[0], layer_idx, row)
        exact = ExactAttention(*at, kv_len=kv_len, sm_scale=self._sm_scale)
        importance = exact.importances(store.num_kv_heads)
        for head, tokens in enumerate(attention.last_selection()):
            if attention.roles is not None and attention.roles[layer_idx, head] == RETRIEVE:
                continue
            reference = ReferenceBudget(policy.budget_tokens, 0, policy.recent_tokens)
            # A bypass of LFPS answers from the sinks.
            chosen = np.array(tokens or range(policy.sink_tokens), np.int32)
            quality = selection_quality(importance[head], chosen, reference)
            self.kept.setdefault((layer_idx, head), []).append(quality.mass_kept)


def loaded(folder: Path, name: str, backend: Any, share: float, **options: Any) -> Any:
    return load(folder, small(name), backend, quality_probe=share, **options)


@pytest.mark.parametrize("name", SPARSE)
def test_with_all_probed_it_is_the_observers_mass(name, tiny_folders):
    model = loaded(tiny_folders["llama"], name, ("cpu", None), 1.0)
    runtime = runtime_of(model)
    exact = ExactMass(runtime.attention, runtime.lean.sm_scale)
    greedy(model, random_tokens(1, 200), NEW_TOKENS)
    quality = model.quality()
    roles = runtime.attention.roles
    if roles is not None:  # heads that attend to everything are not probed
        exact.kept = {at: masses for at, masses in exact.kept.items() if roles[at] != DENSE}
    kept = [mass for of_head in exact.kept.values() for mass in of_head]
    assert quality.probes == quality.selecting_units == len(kept)
    assert quality.selected_mass_kept.mean == pytest.approx(np.mean(kept), abs=1e-5)
    for (layer_idx, head), masses in exact.kept.items():
        assert quality.head_probes[layer_idx, head] == len(masses)
        assert quality.head_mass_kept[layer_idx, head] == pytest.approx(np.mean(masses), abs=1e-5)
        assert quality.head_low[layer_idx, head] < np.mean(masses)
        assert quality.head_high[layer_idx, head] > np.mean(masses)
    share = len(kept) / (len(kept) + quality.exact_units)
    assert quality.mass_kept.mean == pytest.approx(1 - share * (1 - np.mean(kept)), abs=1e-5)


@pytest.mark.parametrize("name", ["exact_topk", "lfps"])
@pytest.mark.parametrize("backend", [INLINE, FLAGS, STREAM, GRAPH])
def test_tokens_are_the_same_and_backends_agree(backend, name, tiny_folders):
    """In a batch whose rows are partly within the budget, with a window on the GPU."""
    tokens, mask = random_tokens(2, 160), torch.ones(2, 160, dtype=torch.long)
    mask[1, :130] = 0
    models = [
        loaded(tiny_folders["llama"], name, device_and_backend, share)
        for device_and_backend in (("cpu", None), backend)
        for share in (0.0, 1.0)
    ]
    expected, *others = (greedy(model, tokens, 16, attention_mask=mask) for model in models)
    for other in others:
        assert torch.equal(other, expected)
    native, quality = (models[i].quality() for i in (1, 3))
    assert quality.probes == quality.selecting_units > 0
    assert quality.exact_units + quality.selecting_units == 15 * 2 * quality.head_probes.size
    np.testing.assert_array_equal(quality.head_probes, native.head_probes)
    np.testing.assert_allclose(
        quality.head_mass_kept, native.head_mass_kept, atol=2e-3, equal_nan=True
    )


@pytest.mark.parametrize("backend", [INLINE, FLAGS, GRAPH])
def test_heads_on_the_gpu_are_exact_and_gathered_ones_left_out(backend, tiny_folders):
    """Lists of the CPU's heads lie in the mailbox, where the GPU publishes again meanwhile."""
    folder, tokens = tiny_folders["llama"], random_tokens(1, 200)
    native = load(folder, small("lychee_decode"), ("cpu", None), quality_probe=1.0)
    expected = greedy(native, tokens, NEW_TOKENS)
    model = load(folder, small("lychee_decode"), backend, quality_probe=1.0)
    decoder = decoder_of(model)
    places, roles = np.array(decoder.placement.places), decoder.attention.roles
    places[roles == RETRIEVE] = Place.GPU
    gathered = np.flatnonzero(roles == REUSE)[0]
    places.flat[gathered] = Place.GATHER
    decoder.place(HeadPlacement(places))
    assert torch.equal(greedy(model, tokens, NEW_TOKENS), expected)
    quality, of_native = model.quality(), native.quality()
    assert quality.gathered_units == NEW_TOKENS - 1
    assert quality.selecting_units == of_native.selecting_units - (NEW_TOKENS - 1)
    assert quality.exact_units == of_native.exact_units
    assert quality.head_probes.flat[gathered] == 0
    probed = quality.head_probes > 0
    assert quality.probes == quality.selecting_units > 0
    np.testing.assert_allclose(
        quality.head_mass_kept[probed], of_native.head_mass_kept[probed], atol=2e-3
    )


def test_forks_and_drafts_are_probed_and_what_is_learned_again_is_not(tiny_folders):
    model = loaded(tiny_folders["llama"], "lfps", ("cpu", None), 1.0)
    greedy(model, random_tokens(1, 150), 20, num_beams=3, num_return_sequences=3)
    quality = model.quality()
    assert quality.probes == quality.selecting_units == 19 * 3 * 2 * 2  # rows, layers, heads
    before = quality.probes
    tokens = torch.cat([random_tokens(1, 150), random_tokens(1, 150)], dim=1)[:, :200]
    greedy(model, tokens, 20, prompt_lookup_num_tokens=3)
    quality = model.quality()
    assert quality.probes == quality.selecting_units
    assert (quality.probes - before) % 4 == 0
    assert quality.probes - before >= 19 * 4


@pytest.mark.parametrize("policy", ["full", "exact_topk"])
def test_what_attends_to_everything_keeps_all(policy, tiny_folders):
    """Full attention, and a context within the budget."""
    model = load(tiny_folders["llama"], make_policy(policy), ("cpu", None), quality_probe=0.5)
    nothing = model.quality()
    assert nothing.mass_kept.mean is None
    assert (nothing.mass_kept.low, nothing.mass_kept.high, nothing.worst_head) == (0.0, 1.0, None)
    greedy(model, random_tokens(1, 50), 5)
    quality = model.quality()
    assert quality.probes == quality.selecting_units == 0
    assert quality.exact_units == 4 * 3 * 2
    assert dataclasses.astuple(quality.mass_kept) == (1.0, 1.0, 1.0)
    assert np.isnan(quality.head_mass_kept).all()


def test_a_share_is_an_estimate_of_the_whole(tiny_folders):
    tokens = random_tokens(8, 70)
    whole, part = (
        loaded(tiny_folders["llama"], "quest", ("cpu", None), share) for share in (1.0, 0.1)
    )
    for model in (whole, part):
        greedy(model, tokens, 24)
    exact, quality = whole.quality(), part.quality()
    units = exact.selecting_units
    assert quality.selecting_units == units
    assert abs(quality.probes - 0.1 * units) < 5 * (0.09 * units) ** 0.5
    assert quality.mass_kept.low <= exact.mass_kept.mean <= quality.mass_kept.high
    assert quality.mass_kept.high - quality.mass_kept.low < 0.5
    worst = quality.worst_head
    assert worst.mass_kept.high == pytest.approx(
        _simultaneous_high(quality)[worst.layer_idx, worst.kv_head]
    )
    assert worst.mass_kept.high == pytest.approx(_simultaneous_high(quality).min())


def _simultaneous_high(quality: Quality) -> Any:
    counts = quality.head_probes
    sums = np.nan_to_num(quality.head_mass_kept) * counts
    return mass_bounds(counts, sums, error=0.05 / counts.size)[1]


def test_it_warns_once_below_the_floor(tiny_folders, caplog):
    folder, tokens = tiny_folders["llama"], random_tokens(1, 150)
    with caplog.at_level(logging.WARNING, logger="offload.runtime.quality"):
        greedy(loaded(folder, "streaming_llm", ("cpu", None), 1.0, quality_floor=0.3), tokens, 50)
        assert not caplog.messages
        model = loaded(folder, "streaming_llm", ("cpu", None), 1.0, quality_floor=0.97)
        for _ in range(3):
            greedy(model, tokens, 50)
    (message,) = caplog.messages
    assert "policy 'streaming_llm' keeps at most" in message
    assert "less than quality_floor=0.97: raise its budget_tokens" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality_probe": -0.1}, "quality_probe must be a number from 0 to 1, got -0.1"),
        ({"quality_probe": 1.5}, "quality_probe must be a number from 0 to 1, got 1.5"),
        ({"quality_probe": float("nan")}, "quality_probe must be a number from 0 to 1, got nan"),
        ({"quality_probe": "0.1"}, "quality_probe must be a number from 0 to 1, got '0.1'"),
        ({"quality_probe": True}, "quality_probe must be a number from 0 to 1, got True"),
        ({"quality_probe": 0.1, "quality_floor": 2}, "quality_floor must be a number from 0 to 1"),
        ({"quality_floor": 0.9}, "quality_floor=0.9 needs quality_probe"),
        ({"quality_probe": 0.1, "tensor_parallel_size": 2}, "a rank sees only its own heads"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        runtime_config(**options)


def test_a_model_without_a_probe_has_nothing_to_say(offloaded_models):
    with pytest.raises(ValueError, match=r"load the model with quality_probe=0\.001"):
        offloaded_models["llama"].quality()


def test_bounds_hold_for_any_distribution_and_without_replacement():
    """Two-sided, of 0.05: masses of coins, near 1, in between; of 400 units, some or most drawn."""
    rng, error, draws = new_rng(), 0.05, 4000
    populations = {
        "coins": (rng.random(400) < 0.9).astype(float),
        "near 1": 1 - 0.05 * rng.random(400) ** 3,
        "rare losses": np.where(rng.random(400) < 0.01, 0.0, 1.0),
        "any": rng.random(400),
    }
    for name, population in populations.items():
        for count in (1, 5, 40, 300):
            order = rng.random((draws, 400)).argsort(1)[:, :count]
            sums = population[order].sum(1)
            low, high = mass_bounds(np.full(draws, count), sums, error=error)
            missed = float(((population.mean() < low) | (population.mean() > high)).mean())
            assert missed <= error, (name, count)
            assert ((low <= sums / count) & (sums / count <= high)).all()


def test_bounds_of_nothing_and_of_certainty():
    low, high = mass_bounds([0, 1, 1000, 1000], [0.0, 1.0, 1000.0, 950.0], error=0.05)
    np.testing.assert_array_equal(low[:1], 0.0)
    np.testing.assert_array_equal(high[:3], 1.0)
    # n ln(1 / low) = ln(2 / error) where all were 1
    np.testing.assert_allclose(low[1:3], [0.025, 0.025 ** (1 / 1000)], rtol=1e-9)
    assert 0.92 < low[3] < 0.95 < high[3] < 0.97
