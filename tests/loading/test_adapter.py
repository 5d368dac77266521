"""An adapter merged into the embedded model: what is computed, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import byte_tokenizer, make_tiny_model, write_gguf
from safetensors.torch import load_file, save_file

from offload import OffloadedModel, load_tokenizer
from offload.loading import gguf as embedded
from offload.loading.adapter import merge_adapter, read_adapter
from offload.loading.names import resolve_folder
from offload.loading.planned_model import planned_model

NAME = "smollm2-135m-instruct-32k"
RANK, ALPHA = 3, 6.0
TARGETS = ("q_proj", "down_proj")


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the embedded one, and an adapter of it: the adapter's folder."""
    gguf_path = tmp_path / "embedded.gguf"
    write_gguf(gguf_path, make_tiny_model("llama"), byte_tokenizer())
    monkeypatch.setattr(embedded, "embedded_gguf", lambda: gguf_path)
    monkeypatch.setattr("offload.loading.planned_model.embedded_gguf", lambda: gguf_path)
    folder = tmp_path / "adapter"
    monkeypatch.setattr(embedded, "LONG_CONTEXT_ADAPTER", folder)
    write_adapter(folder)
    return folder


def write_adapter(folder: Path) -> None:
    folder.mkdir()
    stock = make_tiny_model("llama")
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, weight in stock.named_parameters():
        if name.split(".")[-2] in TARGETS:
            num_out, num_in = weight.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            a = torch.randn(RANK, num_in, generator=generator)
            b = torch.randn(num_out, RANK, generator=generator)
            weights[f"{prefix}.lora_A.weight"] = a.bfloat16()
            weights[f"{prefix}.lora_B.weight"] = b.bfloat16()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"})
    )
    rope = stock.config.rope_parameters
    positions = stock.config.max_position_embeddings
    yarn = {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": 4.0,
        "original_max_position_embeddings": positions,
    }
    settings = {"max_position_embeddings": 4 * positions, "rope_parameters": yarn}
    (folder / "settings.json").write_text(json.dumps(settings))


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_weights(folder: Path, **changed: torch.Tensor | None) -> None:
    """Set the first layer's matrices of q_proj; None takes one away."""
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    for kind, matrix in changed.items():
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{kind}.weight"
        del weights[name]
        if matrix is not None:
            weights[name] = matrix
    save_file(weights, path)


def test_merged_weights_are_base_and_product_to_the_bit(installed: Path) -> None:
    model = OffloadedModel.from_pretrained(NAME, num_threads=1)
    merged = model.state_dict()
    base = make_tiny_model("llama").to(torch.bfloat16).state_dict()
    adapter = load_file(installed / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    num_changed = 0
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            a, b = (adapter[f"{prefix}.lora_{kind}.weight"].float() for kind in "AB")
            weight = (weight.float() + ALPHA / RANK * (b @ a)).bfloat16()
            num_changed += 1
        assert torch.equal(merged[name], weight), name
    assert num_changed == 2 * model.config.num_hidden_layers


def test_positions_everywhere(installed: Path) -> None:
    stock = make_tiny_model("llama").config
    positions = 4 * stock.max_position_embeddings
    config = OffloadedModel.from_pretrained(NAME, num_threads=1).config
    assert config.max_position_embeddings == positions
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["original_max_position_embeddings"] == positions // 4
    assert load_tokenizer(NAME).model_max_length == positions
    planned, of_stock = planned_model(NAME), planned_model("smollm2-135m-instruct")
    assert planned.shape.max_context == positions == 4 * of_stock.shape.max_context
    assert planned.weight_bytes == of_stock.weight_bytes


def test_merged_once(installed: Path, models: Path) -> None:
    folder = resolve_folder(NAME)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_folder(NAME) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    (folder / "model.safetensors").write_bytes(b"cut")
    assert resolve_folder(NAME) == folder
    assert (folder / "model.safetensors").stat().st_size > 3
    change(installed / "adapter_config.json", lora_alpha=2 * ALPHA)
    assert resolve_folder(NAME) != folder
    assert not list(models.glob(".*"))


def test_missing_adapter(installed: Path, models: Path) -> None:
    shutil.rmtree(installed)
    for ask in (resolve_folder, planned_model):
        with pytest.raises(FileNotFoundError, match=f"'{NAME}' needs its adapter in .*adapter"):
            ask(NAME)
    assert not models.exists()


def test_other_base_weights(installed: Path, models: Path) -> None:
    change(installed / "settings.json", gguf_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"sha256 0{64}, but those in .* -m offload download"):
        resolve_folder(NAME)
    assert not models.exists()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported; available: 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.* is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters=.* is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not supported"),
        ({"an_option_of_tomorrow": 3}, "an_option_of_tomorrow=3 is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"lora_alpha": "much"}, "lora_alpha must be positive, got 'much'"),
    ],
)
def test_options_that_merging_does_not_know(
    entries: dict[str, Any], message: str, installed: Path, models: Path
) -> None:
    change(installed / "adapter_config.json", **entries)
    with pytest.raises(ValueError, match=message):
        resolve_folder(NAME)
    assert not models.exists()


def test_a_config_as_peft_writes_it(installed: Path) -> None:
    unset = ("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config")
    unset += ("eva_config", "exclude_modules", "layer_replication", "layers_pattern")
    unset += ("layers_to_transform", "lora_ga_config", "megatron_config", "modules_to_save")
    unset += ("monteclora_config", "revision", "target_parameters", "trainable_token_indices")
    unset += ("use_bdlora", "velora_config")
    of_peft = dict.fromkeys(unset) | {"alpha_pattern": {}, "rank_pattern": {}}
    of_peft |= dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora", "use_rslora"), False)
    of_peft |= {"loftq_config": {}, "ensure_weight_tying": False, "init_lora_weights": True}
    of_peft |= {"base_model_name_or_path": "base", "lora_dropout": 0.05, "inference_mode": True}
    of_peft |= {"megatron_core": "megatron.core", "peft_version": "0.19.1", "qalora_group_size": 16}
    of_peft |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "use_dora": False}
    change(installed / "adapter_config.json", **of_peft)
    assert read_adapter(installed).rank == RANK


@pytest.mark.parametrize("file", ["adapter_config.json", "settings.json"])
def test_files_that_are_missing_or_damaged(file: str, installed: Path, models: Path) -> None:
    (installed / file).write_text("[]")
    with pytest.raises(ValueError, match=f"{file} must hold a JSON object, got list"):
        resolve_folder(NAME)
    for damaged in ("{", "[" * 10**6):
        (installed / file).write_text(damaged)
        with pytest.raises(ValueError, match=f"{file} is not valid JSON"):
            resolve_folder(NAME)
    (installed / file).unlink()
    with pytest.raises(FileNotFoundError, match="adapter"):
        resolve_folder(NAME)
    assert not models.exists()


def test_truncated_weights(installed: Path, models: Path) -> None:
    path = installed / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="truncated or damaged"):
        resolve_folder(NAME)
    assert not models.exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_A": torch.zeros(RANK, 7)}, r"of another model: A and B of .*q_proj.weight are \(3"),
        ({"lora_A": torch.zeros(RANK + 1, 96)}, r"of another model: A and B of .*\(4, 96\)"),
        ({"lora_B": None}, "has no lora_B of model.layers.0.self_attn.q_proj.weight"),
        ({"lora_A": torch.full((RANK, 96), float("nan"))}, "q_proj.weight not finite"),
    ],
)
def test_weights_of_another_model(
    changed: dict[str, torch.Tensor | None], message: str, installed: Path, models: Path
) -> None:
    change_weights(installed, **changed)
    with pytest.raises(ValueError, match=message):
        resolve_folder(NAME)
    assert not list(models.glob(f"{NAME}*"))
    assert not list(models.glob(".*"))


def test_names_that_the_model_has_not(
    installed: Path, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    stock = tiny_folders["llama"]
    path, out = installed / "adapter_model.safetensors", tmp_path / "out"
    out.mkdir()
    matrix = torch.zeros(RANK, 64)
    for name, message in (
        ("base_model.model.model.layers.99.mlp.up_proj.lora_A.weight", "has no lora_B of"),
        ("base_model.model.lm_head.weight", "is no matrix of a LoRA adapter"),
    ):
        save_file({name: matrix}, path)
        with pytest.raises(ValueError, match=message):
            merge_adapter(read_adapter(installed), stock, out)
    prefix = "base_model.model.model.layers.99.mlp.up_proj"
    save_file(
        {f"{prefix}.lora_A.weight": matrix, f"{prefix}.lora_B.weight": matrix.T.contiguous()}, path
    )
    with pytest.raises(ValueError, match=r"it changes model.layers.99.mlp.up_proj.weight"):
        merge_adapter(read_adapter(installed), stock, out)
    assert not list(out.iterdir())
