"""Dtype and sizes of config.json are compared with the files before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.slowly import combinations
from cases.tiny_models import make_tiny_model, random_tokens
from transformers import AutoModelForCausalLM

from offload import HostBudgetError, OffloadedModel, load_tokenizer


def load(folder: Path, **options: Any) -> Any:
    return OffloadedModel.from_pretrained(folder, num_threads=1, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(random_tokens(1, 20)).logits


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("stored", "named"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", None)]
)
def test_the_budget_counts_the_dtype_that_is_loaded(
    tmp_path: Path, stored: str, named: str | None
) -> None:
    """The one that config.json names, whatever the file has; to the byte."""
    stock = make_tiny_model("qwen2").to(getattr(torch, stored))
    stock.save_pretrained(tmp_path)
    change_config(tmp_path, dtype=named)
    loaded = getattr(torch, named or stored)
    weights = stock.num_parameters() * loaded.itemsize
    with pytest.raises(HostBudgetError, match=r"weights need .* max_memory\['cpu'\]"):
        load(tmp_path, max_memory={"cpu": weights - 1})
    model = load(tmp_path, max_memory={"cpu": weights + 2**20})
    assert model.dtype == loaded
    assert model.kv_store.host_budget_bytes == 2**20


def test_weights_of_float64(tmp_path: Path) -> None:
    make_tiny_model("qwen2").to(torch.float64).save_pretrained(tmp_path)
    for named in ("float64", None):
        change_config(tmp_path, dtype=named)
        with pytest.raises(ValueError, match=r"config.json: .* float64, .* give one of bfloat16"):
            load(tmp_path)
        assert load(tmp_path, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "field", "size", "message"),
    combinations(
        ["llama", "mistral", "qwen2", "qwen3"],
        [
            (
                "vocab_size",
                2**20,
                r"embed_tokens.weight, .* \[320, 96\]; .* \[1048576, 96\] \(vocab",
            ),
            ("hidden_size", 6 * 2**16, r"embed_tokens.weight, .* \(vocab_size, hidden_size\)"),
            (
                "intermediate_size",
                2**20,
                r"gate_proj.weight, .* \(intermediate_size, hidden_size\)",
            ),
            ("num_attention_heads", 96, r"q_proj.weight, .* \(num_attention_heads \* head_dim, "),
            (
                "num_key_value_heads",
                6,
                r"k_proj.weight, .* \(num_key_value_heads \* head_dim, hidden",
            ),
            ("head_dim", 64, r"q_proj.weight, .* \(num_attention_heads \* head_dim, hidden"),
            ("num_hidden_layers", 2**16, r"missing keys, such as model.layers.3.* is 65536\)"),
        ],
    ),
)
def test_nothing_is_allocated_that_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str, size: int, message: str
) -> None:
    make_tiny_model(name).save_pretrained(tmp_path)
    layers = size if field == "num_hidden_layers" else 3
    change_config(tmp_path, **{field: size, "layer_types": ["full_attention"] * layers})

    def allocates(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers makes a model of these sizes")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", allocates)
    with pytest.raises(ValueError, match=f"does not fit its config.json: .*{message}"):
        load(tmp_path, max_memory={"cpu": "64MiB"})


@pytest.mark.parametrize("stored", ["without the head", "as the head"])
def test_tied_weights_named_otherwise(tmp_path: Path, stored: str) -> None:
    """Names of the model without its head, and the tied matrix under the name of the head."""
    from safetensors.torch import save_file

    stock = make_tiny_model("llama")
    stock.save_pretrained(tmp_path)
    weights = {name: weight.clone() for name, weight in stock.state_dict().items()}
    del weights["lm_head.weight"]
    if stored == "without the head":
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    else:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(load(tmp_path)), logits(stock), rtol=1e-4, atol=1e-4)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope_type='su' is not supp"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "rope_type='ntk' is not su"),
        (
            {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
            "rope_type='mrope' is not supported yet; available: default, dynamic",
        ),
        (
            {"hidden_act": "swoosh"},
            "hidden_act='swoosh': that activation is not supported yet; available: silu",
        ),
        ({"pad_token_id": 320}, "pad_token_id=320 is not among the 320 tokens"),
        (
            {"rope_parameters": LONGROPE},
            "short_factor must be a list of 16 positive numbers, half of .*=32, got a list",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}},
            "the factor of rope_type='linear' must be positive, got '4'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
            "the rope_theta of rope_type='default' must be positive, got '1e4'",
        ),
        ({"head_dim": 24}, "head_dim must be a multiple of 16 up to 576, got 24"),
        ({"head_dim": 40}, "head_dim must be a multiple of 16 up to 576, got 40"),
    ],
)
def test_what_is_not_computed_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises((ValueError, NotImplementedError), match=f"config.json: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("field", ["attn_implementation", "experts_implementation"])
def test_kernels_of_the_stock_layers_are_not_sought(tmp_path: Path, field: str) -> None:
    """Whatever config.json names: they compute nothing here."""
    stock = make_tiny_model("llama")
    stock.save_pretrained(tmp_path)
    for named in ("flash_attention_2", "eager", "kernels-community/no-such", 5, ["sdpa"]):
        change_config(tmp_path, **{field: named})
        torch.testing.assert_close(logits(load(tmp_path)), logits(stock), rtol=1e-4, atol=1e-4)


def test_paths_are_no_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./nonexistent", "./x", "../x/y", "~/nowhere"):
        for find in (load, load_tokenizer):
            with pytest.raises(FileNotFoundError, match=f"no such model folder.*: {name}"):
                find(name)
    for find in (load, load_tokenizer):
        with pytest.raises(FileNotFoundError, match=f"missing config.json in {tmp_path}"):
            find(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    for find in (load, load_tokenizer):
        with pytest.raises(ValueError, match="unsupported model type 'mamba'"):
            find(tmp_path)
