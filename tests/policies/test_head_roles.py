"""Roles files: what is refused; and calibration: the choice is optimal, the measurement exact."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from cases.inside import runtime_of
from cases.seeded import new_rng
from cases.tiny_models import make_tiny_model, random_tokens

from offload.policies import ExactTopK, LycheeDecode
from offload.policies.lychee_decode.calibration import (
    Calibration,
    calibration_tokens,
    observe_heads,
    roles_from,
)
from offload.policies.lychee_decode.choice import choose_retrieval_heads, choose_select_layers
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles, default_retrieval_heads, evenly_spaced_heads

RETRIEVAL = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 0]], bool)


def roles(**changes) -> HeadRoles:
    made = HeadRoles.of(RETRIEVAL, head_dim=64, model_type="llama", made_by="hand")
    return dataclasses.replace(made, **changes)


@pytest.fixture
def document(tmp_path):
    """(path, what is in it)."""
    path = tmp_path / "roles.json"
    roles().save(path)
    return path, json.loads(path.read_text())


def random_mass(num_kv_heads: int, num_layers: int) -> np.ndarray:
    return np.triu(new_rng().random((num_kv_heads, num_layers, num_layers)))


def test_a_file_says_what_was_saved(document):
    path, content = document
    assert HeadRoles.load(path) == roles()
    assert HeadRoles.load(path).source == str(path)
    np.testing.assert_array_equal(HeadRoles.load(path).array, RETRIEVAL)
    assert HeadRoles.load(path).num_retrieval_heads == 2
    assert content["retrieval"] == RETRIEVAL.tolist()
    assert content["made_by"] == "hand"
    rows = [line for line in path.read_text().splitlines() if line.startswith("    [")]
    assert len(rows) == 4  # a line per layer, to be read and edited


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 5}, "one row per layer, num_layers=5, got 4 rows"),
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"num_kv_heads": "3"}, "num_kv_heads must be an integer of at least 1, got '3'"),
        ({"num_kv_heads": 2}, r"retrieval\[0\] must be one true or false per KV head, num_kv_head"),
        ({"head_dim": True}, "head_dim must be an integer of at least 1, got True"),
        ({"retrieval": 3}, "one row per layer, num_layers=4, got 3"),
        ({"retrieval": [[True] * 3] * 3 + [[1, 0, 1]]}, r"retrieval\[3\] must be one true or fa"),
        ({"model_type": None}, "model_type, checkpoint and made_by must be strings"),
        ({"more": 1}, r"unknown keys \['more'\]; its keys: format, model_type, num_layers"),
        ({"format": "offload-head-roles-9"}, "another format than 'offload-head-roles-2'"),
    ],
)
def test_files_that_are_refused_are_named(document, change, message):
    path, content = document
    path.write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=f"roles file .*roles.json.*{message}"):
        HeadRoles.load(path)


def test_lychee_decode_refuses_sparse_heads_in_layer_0(document):
    """Nothing is above them to reuse; for per_head they are like others."""
    path, content = document
    content["retrieval"][0] = [True, False, False]
    path.write_text(json.dumps(content))
    message = r"roles file .*roles.json: all heads of layer 0 must .*; sparse there: \[1, 2\]"
    with pytest.raises(ValueError, match=message):
        LycheeDecode(head_roles=path)
    policy = make_policy("per_head", head_roles=path, dense_layers=0)
    assert (policy.unit_members(4, 3) == 1).tolist() == content["retrieval"]


def test_files_that_are_something_else(document, tmp_path):
    path, content = document
    del content["head_dim"], content["made_by"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"missing keys \['head_dim', 'made_by'\]"):
        HeadRoles.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"roles\.json must hold a JSON object, got a list"):
        HeadRoles.load(path)
    for damaged in (b"{", b"\xff\xfe\x00", b"[" * 10**6):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"roles\.json is not JSON: "):
            HeadRoles.load(path)
    with pytest.raises(FileNotFoundError, match=r"no roles file .*; write one with `offload"):
        HeadRoles.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="is a folder; give a file"):
        HeadRoles.load(tmp_path)


@pytest.mark.parametrize(
    ("made_for", "checkpoint", "fits"),
    [
        ("0123-5", "0123-5", True),
        ("0123-5", "0123-9", True),  # a copy elsewhere, of the same bytes
        ("0123-5", "0124-5", False),
        ("", "0123-5", True),
        ("0123-5", "", True),
        ("tiny@0123-5", "tiny@0124-9", True),  # converted on another machine
        ("tiny@", "tiny@0124-9", True),
        ("tiny@0123-5", "tiny-32k@0123-5", False),
        ("tiny@", "tiny-32k@", False),
        ("tiny@0123-5", "0123-9", True),
        ("tiny@0123-5", "0124-5", False),
        ("tiny@", "0123-5", True),  # may be a copy of it
    ],
)
def test_other_weights_of_the_same_shape(made_for, checkpoint, fits, tmp_path):
    path = tmp_path / "roles.json"
    roles(checkpoint=made_for).save(path)
    made = HeadRoles.load(path)
    assert made.checkpoint == made_for
    model = {"num_layers": 4, "num_kv_heads": 3, "head_dim": 64, "checkpoint": checkpoint}
    if fits:
        made.check(**model)
        return
    with pytest.raises(ValueError, match=r"roles\.json was made for other weights of th") as error:
        made.check(**model)
    assert f"checkpoint {made_for}, but this model is checkpoint {checkpoint};" in str(error.value)
    assert "make roles for it with `offload calibrate`" in str(error.value)


def test_another_model():
    model = {"num_layers": 4, "num_kv_heads": 3, "head_dim": 64}
    roles().check(**model)
    roles().check(**model, model_type="llama")
    roles(model_type="").check(**model, model_type="qwen2")
    with pytest.raises(ValueError, match=r"head roles was made .* model_type=llama, .*=qwen2, num"):
        roles().check(**model, model_type="qwen2")
    for name in model:
        with pytest.raises(ValueError, match=f"{name}={model[name]}.*this model has.*{name}=7"):
            roles().check(**{**model, name: 7})


@pytest.mark.parametrize("num_layers", [1, 2, 5, 30])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_evenly_spaced_heads_are_as_many_as_asked(num_layers, num_kv_heads):
    most = (num_layers - 1) * num_kv_heads
    assert default_retrieval_heads(num_layers, num_kv_heads) <= most
    for count in range(most + 1):
        retrieval = evenly_spaced_heads(num_layers, num_kv_heads, count)
        assert retrieval[0].all()
        assert retrieval[1:].sum() == count
        per_head = retrieval[1:].sum(0)
        assert per_head.max() - per_head.min() <= 1
    with pytest.raises(ValueError, match=rf"must be in \[0, {most}\]"):
        evenly_spaced_heads(num_layers, num_kv_heads, most + 1)


def calibration_of(mass_kept, copy_mass=None) -> Calibration:
    num_kv_heads, num_layers, _ = mass_kept.shape
    if copy_mass is None:
        copy_mass = np.zeros((num_layers, num_kv_heads))
    return Calibration(mass_kept, copy_mass, 100, 10)


def test_copying_heads_come_first():
    """Those that copy most, as far as there is room; never layer 0, never heads that do not."""
    mass = random_mass(2, 5)
    copy_mass = np.array([[0.9, 0.9], [0.1, 0.3], [0.14, 0.0], [0.6, 0.0], [0.2, 0.0]])
    calibration = calibration_of(mass, copy_mass)
    for most, wanted in ((1, [(3, 0)]), (2, [(1, 1), (3, 0)]), (8, [(1, 1), (3, 0), (4, 0)])):
        copying = calibration.copying_heads(most)
        assert [tuple(head) for head in np.argwhere(copying)] == wanted
        retrieval = choose_retrieval_heads(mass, most, copying)
        assert retrieval[copying].all()
        assert retrieval[1:].sum() == most
    best = 0.0  # of those that include them
    copying = calibration.copying_heads(3)
    for heads in itertools.combinations(range(2, 10), 5):
        retrieval = np.arange(10) < 2
        retrieval[list(heads)] = True
        grid = retrieval.reshape(5, 2)
        best = max(best, calibration.kept_by(grid) if grid[copying].all() else 0.0)
    chosen = choose_retrieval_heads(mass, 5, copying)
    assert calibration.kept_by(chosen) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("retrieval_heads", range(9))
def test_no_other_choice_keeps_more(retrieval_heads):
    """Against all choices of so many of 2 x 4 heads."""
    mass = random_mass(2, 5)
    calibration = calibration_of(mass)
    chosen = choose_retrieval_heads(mass, retrieval_heads)
    assert chosen[0].all()
    assert chosen[1:].sum() == retrieval_heads
    best = 0.0
    for heads in itertools.combinations(range(2, 10), retrieval_heads):
        retrieval = np.arange(10) < 2
        retrieval[list(heads)] = True
        best = max(best, calibration.kept_by(retrieval.reshape(5, 2)))
    assert calibration.kept_by(chosen) == pytest.approx(best, abs=1e-12)


def test_no_other_select_layers_keep_more():
    mass = random_mass(3, 8)
    for count in range(1, 7):
        best = {}
        for others in itertools.combinations(range(3, 8), count - 1):
            retrieval = np.zeros(8, bool)
            retrieval[[2, *others]] = True
            kept = mass[:, 2:, 2:]
            grid = np.repeat(retrieval[2:, None], 3, 1)
            best[(2, *others)] = calibration_of(kept).kept_by(grid)
        assert best[tuple(choose_select_layers(mass, count, 2))] == max(best.values())
    wanted = np.zeros(8, bool)
    wanted[[1, 4, 7]] = True
    assert choose_select_layers(mass, 3, 2, wanted) == [2, 4, 7]
    assert choose_select_layers(mass, 2, 2, wanted)[1] in (4, 7)
    with pytest.raises(ValueError, match=r"must be in \[1, 6\], .*dense_layers=2, got 7"):
        choose_select_layers(mass, 7, 2)


def test_mass_kept_by_hand():
    mass = np.zeros((1, 4, 4))
    mass[0] = [[1, 0.5, 0.2, 0.1], [0, 1, 0.9, 0.3], [0, 0, 1, 0.4], [0, 0, 0, 1]]
    calibration = calibration_of(mass)
    for rows, kept in (
        ([1, 0, 0, 0], (0.5 + 0.2 + 0.1) / 3),
        ([1, 1, 0, 0], (1.0 + 0.9 + 0.3) / 3),
        ([1, 1, 0, 1], (1.0 + 0.9 + 1.0) / 3),
    ):
        assert calibration.kept_by(np.array(rows, bool)[:, None]) == pytest.approx(kept)
    assert choose_retrieval_heads(mass, 1)[:, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_measured_mass_is_that_of_the_stock_model(name, stock_models, offloaded_models):
    """Eager attention weights of transformers, summed over the tokens each layer finds."""
    tokens = random_tokens(300)  # of which the last 18 give way to a repetition
    tokens[282:] = tokens[70:88]
    calibration = observe_heads(runtime_of(offloaded_models[name]).lean, tokens)
    stock = stock_models[name]
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = stock(tokens[None], output_attentions=True).attentions
    stock.set_attn_implementation("sdpa")
    layers = [a[0].double().numpy().reshape(2, 3, 300, 300).sum(1) for a in attentions]
    budget = calibration.tokens_per_head
    assert budget == 300 // 16
    expected = np.zeros_like(calibration.mass_kept)
    positions = np.linspace(141, 281, 32).astype(int)
    for position in positions:
        last = position + 1 - 64
        for head, above in itertools.product(range(2), range(3)):
            found = 4 + np.argsort(-layers[above][head, position, 4:last])[:budget]
            for below in range(above, 3):
                weights = layers[below][head, position, : position + 1]
                kept = weights[found].sum() + weights[last:].sum()
                expected[head, above, below] += kept / weights[4:].sum() / len(positions)
    np.testing.assert_allclose(calibration.mass_kept, expected, atol=2e-3)
    copied = np.zeros((3, 2))
    for layer_idx, attention in enumerate(attentions):
        per_head = attention[0].double().numpy().reshape(2, 3, 300, 300)[:, :, 282:, :282]
        per_head = per_head / per_head.sum(-1, keepdims=True)
        copied[layer_idx] = per_head[..., 70:88].sum(-1).mean(-1).max(1)
    np.testing.assert_allclose(calibration.copy_mass, copied, atol=2e-3)


def calibrate_roles(model: Any, input_ids: torch.Tensor, **options: Any) -> HeadRoles:
    lean = runtime_of(model).lean
    model_type, head_dim = model.config.model_type, lean.shape.head_dim
    calibration = observe_heads(lean, input_ids)
    return roles_from(calibration, model_type=model_type, head_dim=head_dim, **options)


def test_calibrated_roles_fit_their_model(offloaded_models):
    model = offloaded_models["qwen2"]
    made = calibrate_roles(model, random_tokens(1, 300), retrieval_heads=2)
    made.check(num_layers=3, num_kv_heads=2, head_dim=32, model_type="qwen2")
    assert made.num_retrieval_heads == 2
    assert made.made_by.startswith("calibration on 300 tokens of a text: 2 retrieval heads after")
    assert calibrate_roles(model, random_tokens(300)).num_retrieval_heads == 1  # a sixth of 6
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize(
    ("num_tokens", "options", "message"),
    [
        (255, {}, "calibration needs a text of at least 256 tokens, got 255"),
        (0, {}, "calibration needs a text of at least 256 tokens, got 0"),
        (513, {}, "a calibration text of 513 tokens exceeds the 512 tokens of this model"),
        (300, {"retrieval_heads": 5}, r"retrieval_heads=5 must be in \[0, 4\]"),
        (300, {"retrieval_heads": 1.5}, r"retrieval_heads must be an int, got 1\.5"),
    ],
)
def test_texts_and_numbers_that_do_not_fit(num_tokens, options, message, offloaded_models):
    with pytest.raises(ValueError, match=message):
        calibrate_roles(offloaded_models["llama"], random_tokens(num_tokens), **options)


def test_calibration_tokens(tokenizer):
    tokens = calibration_tokens(tokenizer, 400)
    assert tokens.shape == (400,)
    assert torch.equal(calibration_tokens(tokenizer, 300), tokens[:300])
    assert calibration_tokens(tokenizer, 300, "abc").tolist() == tokenizer("abc")["input_ids"]


def calibrated(policy, model, tokenizer):
    loads = []

    def load():
        loads.append(1)
        return tokenizer

    lean = runtime_of(model).lean
    made = policy.calibration.learn(lambda: lean, "llama", load, lambda: "tiny-llama")
    return made, len(loads)


def test_policies_without_roles_get_them(
    offloaded_models, tokenizer, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    model = offloaded_models["llama"]
    policy = LycheeDecode(budget_tokens=128, retrieval_heads=3, rule="ratio", ratio=0.5)
    with caplog.at_level(logging.INFO, logger="offload"):
        made, loads = calibrated(policy, model, tokenizer)
    assert loads == 1
    assert isinstance(made, LycheeDecode)
    assert isinstance(made.head_roles, HeadRoles)
    assert made.head_roles.num_retrieval_heads == 3
    assert made.head_roles.model_type == "llama"
    assert (made.budget_tokens, made.rule, made.ratio) == (128, "ratio", 0.5)
    assert "lychee_decode has no head_roles: calibration on 512 tokens of the stand" in caplog.text
    assert made.head_roles.checkpoint == "tiny-llama"
    expected = roles_from(
        observe_heads(runtime_of(model).lean, calibration_tokens(tokenizer, 512)),
        model_type="llama",
        head_dim=32,
        retrieval_heads=3,
    )
    np.testing.assert_array_equal(made.head_roles.array, expected.array)


def test_other_policies_are_left_alone(offloaded_models, tokenizer):
    model = offloaded_models["llama"]
    given = HeadRoles.of(np.ones((3, 2), bool), head_dim=32)
    for policy in (ExactTopK(), LycheeDecode(head_roles=given)):
        made, loads = calibrated(policy, model, tokenizer)
        assert made is policy
        assert loads == 0
    other = HeadRoles.of(np.ones((3, 2), bool), head_dim=32, model_type="mistral")
    with pytest.raises(ValueError, match=r"it says model_type=mistral, .* has model_type=llama"):
        calibrated(LycheeDecode(head_roles=other), model, tokenizer)
    for name in ("lychee_decode", "per_head"):
        given = HeadRoles.of(np.eye(3, 2, dtype=bool) | (name == "lychee_decode"), head_dim=32)
        options = {"head_roles": dataclasses.replace(given, checkpoint="other-llama")}
        policy = make_policy(name, **options, **({"dense_layers": 1} if name == "per_head" else {}))
        with pytest.raises(ValueError, match=r"checkpoint other-llama, .* checkpoint tiny-llama;"):
            calibrated(policy, model, tokenizer)
    with pytest.raises(ValueError, match=r"retrieval_heads=9 must be in \[0, 4\]"):
        calibrated(LycheeDecode(retrieval_heads=9), model, tokenizer)


def test_a_model_too_short_for_calibration(tokenizer, caplog):
    from offload.models import lean_model_maker

    stock = make_tiny_model("llama", max_position_embeddings=128)
    lean = lean_model_maker("llama")(stock)
    with caplog.at_level(logging.WARNING, logger="offload"):
        made = LycheeDecode().calibration.learn(
            lambda: lean, "llama", lambda: tokenizer, lambda: "tiny-llama"
        )
    assert made == LycheeDecode()
    assert "a context of 128 tokens is too short for a calibration" in caplog.text
