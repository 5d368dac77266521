"""Select layers that are found while a model is loaded: how, when, and where they are kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens

from offload.models import lean_model_maker
from offload.policies import ExactTopK, TidalDecode
from offload.policies.per_head.lookups import LookUp
from offload.policies.tidal_decode import SelectLayers, calibration
from offload.policies.tidal_decode.calibration import choose_layers, kept_by, lookups_kept
from offload.policies.tidal_decode.select_layers import kept_path

CHECKPOINT = "0123-5"
LAYERS = 6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def lean() -> Any:
    stock = make_tiny_model("qwen3", num_hidden_layers=LAYERS, max_position_embeddings=1024)
    return lean_model_maker("qwen3")(stock)


def learn(lean: Any, tokenizer: Any, policy: TidalDecode, checkpoint: str = CHECKPOINT) -> Any:
    of_model = (lambda: lean, "qwen3", lambda: tokenizer, lambda: checkpoint)
    return policy.calibration.learn(*of_model)


def sparse(layers: Any = None) -> TidalDecode:
    return TidalDecode(ExactTopK(dense_layers=1), layers)


def fails(*_: Any) -> Any:
    raise AssertionError("calibrated again")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_layers_keep_is_that_of_the_stock_model(name: str) -> None:
    """And the layer beside which most is kept is the one that is chosen."""
    stock = make_tiny_model(name, num_hidden_layers=LAYERS)
    tokens = random_tokens(320)
    lookups = [LookUp(range(250, 255), range(40, 45)), LookUp(range(280, 283), range(100, 103))]
    kept = lookups_kept(lean_model_maker(name)(stock), tokens, lookups)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = stock(tokens[None], output_attentions=True).attentions
    weights = [attention[0].double().sum(0).numpy() for attention in attentions]  # of all heads
    expected = np.zeros((LAYERS, LAYERS))
    for lookup in lookups:
        for query in lookup.queries:
            free = np.arange(4, query - 63)
            for i in range(LAYERS):
                row = weights[i][query]
                selected = set(free[np.argsort(-row[free])[: 320 // 32]])
                expected[i, i] += row[lookup.fact.start : lookup.fact.stop].sum()
                for j in range(i + 1, LAYERS):
                    held = selected.intersection(lookup.fact)
                    expected[i, j] += sum(weights[j][query, token] for token in held)
    np.testing.assert_allclose(kept, expected, atol=2e-3)

    def share(layer: int) -> float:
        attends = [j if j in (1, layer) else 1 if j < layer else layer for j in range(1, LAYERS)]
        return float(sum(expected[i, j] for j, i in enumerate(attends, start=1)))

    assert choose_layers(kept, 1) == (1, max(range(2, LAYERS), key=share))
    for layer in range(2, LAYERS):
        assert kept_by(expected, (1, layer)) == pytest.approx(share(layer))


def test_the_layer_whose_choice_the_others_look_up_is_chosen() -> None:
    kept = np.eye(8)
    kept[4, 5:] = 0.9  # layers below look where layer 4 does
    kept[2, 3:] = 0.1
    kept[6, 7] = 1.0
    assert choose_layers(kept, 2) == (2, 4)


def test_a_model_is_calibrated_once(
    lean: Any, tokenizer: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with caplog.at_level(logging.INFO, logger="offload"):
        made = learn(lean, tokenizer, sparse())
    assert caplog.messages[0] == (
        "tidal_decode: finding the layers of this model that retrieve, on cpu, once (18 layers to "
        "read)"
    )
    assert caplog.messages[-1].startswith(
        "tidal_decode has no select_layers: calibration on look-ups in texts of 1024 tokens: with "
        f"layers {made.select_layers} the layers after the first 1 keep "
    )
    assert made.inner == sparse().inner
    kept = calibration.mean_lookups_kept(lean, tokenizer, 1024, 1)
    assert kept.diagonal()[1:].sum() == pytest.approx(1.0)
    assert made.select_layers.select_layers == choose_layers(kept, 1)
    assert made.select_layers.checkpoint == CHECKPOINT
    monkeypatch.setattr(calibration, "mean_lookups_kept", fails)
    caplog.clear()
    assert learn(lean, tokenizer, sparse()) == made
    shape = lean.shape.kv_heads
    assert sparse().calibration.with_kept(lambda: CHECKPOINT, "qwen3", **shape) == made
    assert not caplog.messages
    with pytest.raises(AssertionError, match="calibrated again"):
        learn(lean, tokenizer, sparse(), "4567-8")
    swept = replace(made.select_layers, select_layers=(1, 5), made_by="a sweep")
    swept.keep(kept_path(CHECKPOINT, 1) or cache)
    assert learn(lean, tokenizer, sparse()).select_layers == swept


def test_a_users_word_wins(lean: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "mean_lookups_kept", fails)
    given = SelectLayers("qwen3", **lean.shape.kv_heads, select_layers=(1, 3), dense_layers=1)
    for policy in (sparse((1, 4)), sparse(given)):
        assert learn(lean, tokenizer, policy) is policy


def test_a_damaged_file_is_made_again(lean: Any, tokenizer: Any, caplog: Any, cache: Path) -> None:
    made = learn(lean, tokenizer, sparse())
    (file,) = (path for path in cache.rglob("*") if path.is_file())
    file.write_text(file.read_text().replace('"select_layers": [1', '"select_layers": [9'))
    caplog.clear()
    assert learn(lean, tokenizer, sparse()) == made
    assert f"layers file {file}: select_layers=" in caplog.text
    assert "names layer 9, but this model has layers 0 to 5; it is left" in caplog.text
    assert SelectLayers.load(file) == made.select_layers


def test_what_cannot_be_calibrated_has_layers_by_depth(
    lean: Any, tokenizer: Any, caplog: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tokenizer() -> Any:
        raise OSError("there is no tokenizer")

    policy = sparse()
    short = replace(lean, shape=replace(lean.shape, max_context=512))
    with caplog.at_level(logging.INFO, logger="offload"):
        assert learn(short, tokenizer, policy) is policy
        assert "a context of 512 tokens is too short" in caplog.text
        assert "tidal_decode selects in layers 1,2; `offload calibrate MODEL" in caplog.text
        of_model = (lambda: lean, "qwen3", no_tokenizer, lambda: CHECKPOINT)
        assert policy.calibration.learn(*of_model) is policy
        assert "no calibration without a tokenizer: there is no tokenizer" in caplog.text
    monkeypatch.setattr(calibration, "mean_lookups_kept", fails)
    deep = TidalDecode(ExactTopK(dense_layers=4))  # nothing to choose: two layers are left
    assert learn(lean, tokenizer, deep) is deep
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_to_is_no_error(
    lean: Any, tokenizer: Any, caplog: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("OFFLOAD_CACHE", str(cache / "file"))
    with caplog.at_level(logging.INFO, logger="offload"):
        assert learn(lean, tokenizer, sparse()).select_layers is not None
    assert "set OFFLOAD_CACHE to a folder that can be written to" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "shape", "calibrates"),
    [("llama", (30, 3), False), ("llama", (32, 8), False), ("mistral", (32, 8), True)],
)
def test_layers_that_answers_told_stay(
    lean: Any, monkeypatch: pytest.MonkeyPatch, model_type: str, shape: Any, calibrates: bool
) -> None:
    """They stay for the models they were found for: another type of that shape is another model."""
    asked = []
    monkeypatch.setattr(calibration, "calibrated_layers", lambda *args: asked.append(args))
    num_layers, num_kv_heads = shape
    of_shape = replace(lean.shape, num_layers=num_layers, num_kv_heads=num_kv_heads)
    policy = TidalDecode()
    of_model = (lambda: replace(lean, shape=of_shape), model_type, fails, lambda: CHECKPOINT)
    assert policy.calibration.learn(*of_model) is policy
    assert bool(asked) is calibrates
