"""The text part of a multi-modal checkpoint has lean layers where its type has some."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_config, tiny_model_of
from safetensors.torch import load_file, save_file

from offload import OffloadedModel
from offload.loading.checkpoint import check_checkpoint
from offload.loading.planned_model import planned_model, planned_skeleton
from offload.models import is_generic
from offload.models.packed_linear import PackedMatrix
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.generic_loading import GenericRuntime
from offload.runtime.runtime import Runtime

_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
# multi-modal type, and that of its text if it may have others -> what differs in its text_config
LEAN: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 24},
    "gemma4": {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    "mistral3": {"sliding_window": None},
    "mistral3 ministral3": {"rope_parameters": _GROWING},  # Ministral 3
    "llava": {},
    "internvl": {},
    "smolvlm": {},
}
GENERIC = {"mistral3": {"sliding_window": 24}, "gemma4": {"hidden_size_per_layer_input": 8}}
OPTIONS: dict[str, Any] = {"num_threads": 1, "page_tokens": 16, "max_memory": {"cpu": "1GiB"}}
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def whole(types: str, changes: dict[str, Any]) -> Any:
    model_type, *of_text = types.split()
    text = tiny_config(of_text[0]) if of_text else tiny_config(model_type).text_config
    for name, value in changes.items():
        setattr(text, name, value)
    stock = tiny_model_of(model_type, text_config=text)
    stock.generation_config.eos_token_id = None
    return stock


def tokens(model: Any) -> list[Any]:
    """Of one prompt, and of two in a padded batch."""
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :11] = ids[0, :11] = 0
    return [
        model.generate(input_ids=ids[rows], attention_mask=mask[rows], **SETTINGS).tolist()
        for rows in (slice(1, 2), slice(0, 2))
    ]


@pytest.mark.parametrize("model_type", LEAN)
def test_tokens_are_those_of_the_multi_modal_model(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = whole(model_type, LEAN[model_type])
    expected = tokens(stock)
    stock.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    with caplog.at_level("INFO"):
        model = OffloadedModel.from_pretrained(tmp_path / "sharded", **OPTIONS)
    assert caplog.text.count("images and sound are not read") == 1
    assert type(model._offload) is Runtime
    assert tokens(model) == expected
    planned = planned_model(str(tmp_path / "sharded"))
    assert planned.weight_bytes == weight_bytes_of(model)
    assert planned_skeleton(str(tmp_path / "sharded")) is None
    model.save_pretrained(tmp_path / "text")
    again = OffloadedModel.from_pretrained(tmp_path / "text", **OPTIONS)
    assert tokens(again) == expected


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "mistral3"])
def test_packed_weights(model_type: str, tmp_path: Path) -> None:
    stock = whole(model_type, LEAN[model_type])
    stock.save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(tmp_path, weights="q8", **OPTIONS)
    assert type(model._offload) is Runtime
    assert sum(isinstance(x, PackedMatrix) for x in model.modules()) > 20
    assert planned_model(str(tmp_path), weights="q8").weight_bytes == weight_bytes_of(model)
    ids = torch.arange(40)[None]
    wanted = stock(input_ids=ids).logits
    assert (model(ids).logits - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("model_type", GENERIC)
def test_what_lean_layers_do_not_compute(model_type: str, tmp_path: Path) -> None:
    stock = whole(model_type, GENERIC[model_type])
    stock.save_pretrained(tmp_path)
    model = OffloadedModel.from_pretrained(tmp_path, **OPTIONS)
    assert isinstance(model._offload, GenericRuntime)
    assert tokens(model) == tokens(stock)


def test_a_gpu_runs_modules_of_what_its_step_does_not_compute(tmp_path: Path) -> None:
    whole("gemma4", LEAN["gemma4"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert is_generic(config, where="gpu")
    assert not is_generic(config)
    assert is_generic(check_checkpoint(tmp_path).config, where="gpu")
    assert planned_skeleton(str(tmp_path), device="cuda") is not None


def test_end_tokens_are_those_of_the_whole_model(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    stock = whole("gemma3", {"eos_token_id": 1, **sizes})
    stock.config.eos_token_id = [1, 7]
    stock.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["eos_token_id"] == [1, 7]
    for name in sizes:  # as Google writes it, without those that are the class's own
        del config["text_config"][name]
    path.write_text(json.dumps(config))
    model = OffloadedModel.from_pretrained(tmp_path, **OPTIONS)
    assert model.generation_config.eos_token_id == [1, 7]


def test_other_names(tmp_path: Path) -> None:
    """A missing matrix, and one too many; `model.language_model`, as newer files have it."""
    stock = whole("llava", {})
    stock.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def load(names: dict[str, str]) -> Any:
        renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
        save_file(renamed, path, {"format": "pt"})
        return OffloadedModel.from_pretrained(tmp_path, **OPTIONS)

    newer = {
        name: re.sub(r"^language_model\.model", "model.language_model", name) for name in tensors
    }
    newer["language_model.lm_head.weight"] = "lm_head.weight"
    assert tokens(load(newer)) == tokens(stock)
    layer = "language_model.model.layers"
    with pytest.raises(ValueError, match=r"missing keys, such as model\.layers\.0\.mlp\.up_proj"):
        load({f"{layer}.0.mlp.up_proj.weight": f"{layer}.0.mlp.up.weight"})
    tensors[f"{layer}.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"unexpected keys, such as model\.layers\.9"):
        load({})
