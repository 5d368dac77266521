"""Calibration of per_head: texts with far facts, and the attention that heads give to them."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases.inside import runtime_of
from cases.tiny_models import make_tiny_model, random_tokens

from offload import OffloadedModel
from offload.models import lean_model_maker
from offload.policies import PerHead
from offload.policies.lychee_decode.calibration import observe_heads
from offload.policies.per_head.calibration import calibrated_roles, lookup_mass, roles_by_mass
from offload.policies.per_head.lookups import LookUp, lookup_texts
from offload.policies.per_head.policy import PerHeadCalibration
from offload.policies.registry import make_policy
from offload.runtime import model_loading
from offload.selection.head_roles import HeadRoles


@pytest.mark.parametrize("num_tokens", [1024, 2048])
def test_answers_repeat_facts_that_stand_afar(tokenizer, num_tokens):
    texts = lookup_texts(tokenizer, num_tokens)
    assert len(texts) == 3
    for tokens, lookups in texts:
        assert num_tokens - 64 < len(tokens) <= num_tokens
        for lookup in lookups:
            answer = tokens[lookup.queries.start + 1 : lookup.queries.stop + 1]
            assert torch.equal(answer, tokens[lookup.fact.start : lookup.fact.stop])
            assert lookup.queries.start - lookup.fact.stop > num_tokens // 16
        facts = sorted((lookup.fact for lookup in lookups), key=lambda fact: fact.start)
        assert len(facts) == 6
        assert all(a.stop < b.start for a, b in pairwise(facts))
        assert facts[0].start < num_tokens // 3  # some are deep, others not
        assert [lookup.fact for lookup in lookups] != facts
    again = lookup_texts(tokenizer, num_tokens)
    for (tokens, lookups), (same, also) in zip(texts, again, strict=True):
        assert torch.equal(tokens, same)
        assert lookups == also


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mass_is_that_of_the_stock_model(name, stock_models, offloaded_models):
    tokens = random_tokens(300)
    lookups = [LookUp(range(250, 255), range(40, 45)), LookUp(range(280, 283), range(100, 103))]
    mass = lookup_mass(runtime_of(offloaded_models[name]).lean, tokens, lookups)
    stock = stock_models[name]
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = stock(tokens[None], output_attentions=True).attentions
    stock.set_attn_implementation("sdpa")
    expected = np.zeros((3, 2))
    for layer_idx, attention in enumerate(attentions):
        weights = attention[0].double().numpy().reshape(2, 3, 300, 300)
        for queries, fact in ((slice(250, 255), slice(40, 45)), (slice(280, 283), slice(100, 103))):
            on_fact = weights[:, :, queries, fact].sum(-1).mean(-1)
            expected[layer_idx] += on_fact.max(1) / 2
    np.testing.assert_allclose(mass, expected, atol=2e-3)
    assert offloaded_models[name].kv_store.num_sequences == 0


def test_the_heads_that_look_most_are_chosen(monkeypatch, offloaded_models, tokenizer, caplog):
    """After the dense layers, as many as asked for."""
    lean = runtime_of(offloaded_models["llama"]).lean
    lean = replace(lean, shape=replace(lean.shape, max_context=4096))
    mass = np.array([[0.9, 0.8], [0.1, 0.3], [0.4, 0.0]])
    monkeypatch.setattr("offload.policies.per_head.calibration.lookup_mass", lambda *_: mass)
    with caplog.at_level(logging.INFO, logger="offload"):
        roles = calibrated_roles(lean, "llama", lambda: tokenizer, 2, 1)
    assert roles is not None
    assert roles.array.tolist() == [[False, False], [False, True], [True, False]]
    assert "2 heads after the first 1 layers, which give 0.30 to 0.40" in caplog.text


def calibrated(policy, model, tokenizer):
    lean = runtime_of(model).lean
    return policy.calibration.learn(lambda: lean, "llama", lambda: tokenizer, lambda: "tiny-llama")


def test_roles_that_are_given_stay(offloaded_models, tokenizer, caplog):
    model = offloaded_models["llama"]
    given = HeadRoles.of(np.array([[1, 1], [0, 1], [0, 0]], bool), head_dim=32, model_type="llama")
    policy = make_policy("per_head", head_roles=given, dense_layers=1)
    assert calibrated(policy, model, tokenizer) is policy
    assert isinstance(policy, PerHead)
    other = make_policy(
        "per_head", head_roles=HeadRoles.of(given.array, head_dim=32, model_type="qwen2")
    )
    with pytest.raises(ValueError, match=r"model_type=qwen2, .*this model has model_type=llama"):
        calibrated(other, model, tokenizer)
    with pytest.raises(ValueError, match=r"2 retrieval heads .* at most 1 may retrieve"):
        calibrated(make_policy("per_head", retrieval_heads=2), model, tokenizer)


def test_short_contexts_keep_spaced_heads(offloaded_models, tokenizer, caplog):
    policy = make_policy("per_head", retrieval_heads=1, dense_layers=1)
    assert calibrated(policy, offloaded_models["llama"], tokenizer) is policy
    assert "a context of 512 tokens is too short for a calibration" in caplog.text
    assert (policy.unit_members(3, 2)[1:] == 1).sum() == 1


def test_a_model_is_on_its_device_when_it_is_calibrated(monkeypatch, tiny_folders):
    """Which reads thousands of tokens: a GPU takes seconds for what takes a CPU minutes."""
    events = []

    def moved(stock, config):
        events.append("moved")

    def learn(self, *_, **__):
        events.append("calibrated")
        return self.policy

    monkeypatch.setattr(model_loading, "move_to_device", moved)
    monkeypatch.setattr(PerHeadCalibration, "learn", learn)
    policy = make_policy("per_head", dense_layers=1)
    OffloadedModel.from_pretrained(tiny_folders["llama"], policy=policy)
    assert events == ["moved", "calibrated"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_gpu_finds_what_a_cpu_finds(name):
    stock, tokens = make_tiny_model(name), random_tokens(500)
    lookups = [LookUp(range(450, 455), range(40, 45)), LookUp(range(480, 483), range(100, 103))]
    found = []
    for device in ("cpu", "cuda"):
        lean = lean_model_maker(name)(stock.to(device))
        seen = observe_heads(lean, tokens)
        found.append((lookup_mass(lean, tokens, lookups), seen.mass_kept, seen.copy_mass))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert on_cpu.any()
        np.testing.assert_allclose(on_gpu, on_cpu, atol=0.01)
    heads = [roles_by_mass(x[0], 2, 1, num_tokens=500, head_dim=32, model_type="") for x in found]
    assert (heads[0].array == heads[1].array).all()
