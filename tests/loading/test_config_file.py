"""Dtype and sizes of config.json are compared with the files before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens
from transformers import AutoModelForCausalLM

from offload import HostBudgetError, OffloadedModel


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


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("field", "size", "message"),
    [
        ("vocab_size", 2**20, r"embed_tokens.weight, .* \[320, 96\]; .* \[1048576, 96\] \(vocab"),
        ("hidden_size", 6 * 2**16, r"embed_tokens.weight, .* \(vocab_size, hidden_size\)"),
        ("intermediate_size", 2**20, r"gate_proj.weight, .* \(intermediate_size, hidden_size\)"),
        ("num_attention_heads", 96, r"q_proj.weight, .* \(num_attention_heads \* head_dim, "),
        ("num_key_value_heads", 6, r"k_proj.weight, .* \(num_key_value_heads \* head_dim, hidden"),
        ("head_dim", 64, r"q_proj.weight, .* \(num_attention_heads \* head_dim, hidden"),
        ("num_hidden_layers", 2**20, r"missing keys, such as model.layers.3.* is 1048576\)"),
    ],
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
