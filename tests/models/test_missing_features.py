"""A model that is refused is told what it has that is missing here, and which models work."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model, write_gguf
from transformers import AutoConfig

from offload import OffloadedModel
from offload.loading.checkpoint import check_config_file
from offload.loading.gguf_config import gguf_config
from offload.loading.gguf_header import read_gguf_header
from offload.loading.names import load_tokenizer
from offload.models import is_generic
from offload.models.missing_features import missing_features

TYPES = {
    "gemma4": ["sliding-window layers", "activation gelu_pytorch_tanh"],
    "gemma2": ["sliding-window", "soft caps of logits (attn_logit_softcapping=50.0, final_"],
    "qwen3_5": ["images beside text", "layers of linear attention", "a part of each head"],
    "qwen3_5_moe": ["linear attention", "a mixture of experts, MoE (num_experts=256)"],
    "qwen3_next": ["linear attention", "a mixture of experts"],
    "deepseek_v3": ["latent attention, MLA (kv_lora_rank=512)", "MoE (n_routed_experts=256)"],
    "deepseek_v2": ["MLA (kv_lora_rank=512)", "MoE (n_routed_experts=64)"],
    "llama4": ["images beside text", "chunked attention", "MoE (num_local_experts=16)"],
    "gemma3n": ["images and audio beside text", "sliding-window layers (sliding_window=512)"],
    "mamba": ["state-space layers instead of attention"],
    "falcon_h1": ["state-space layers (mamba_d_s"],
    "glm4": ["rotary embeddings of a part of each head (partial_rotary_factor=0.5)"],
    "t5": ["an encoder beside the decoder"],
}
WORKS = (
    "available: exaone4, gemma3_text, gemma4_text, gpt_oss, granite, llama, ministral3, mistral, "
    "mixtral, olmo2, olmo3, phi3, qwen2, qwen3, qwen3_moe, seed_oss, smollm3 "
    "(dense models of text, such as Llama 3, SmolLM2, "
    "Mistral, Qwen2.5 and Qwen3)"
)
WITHOUT = "; generate() and `offload generate` run it without lean layers"


@pytest.mark.parametrize("model_type", TYPES)
def test_what_a_config_has(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    load: Any = OffloadedModel.from_pretrained
    if is_generic(config.to_dict()):
        load = partial(load_tokenizer, takes_generic=False)
    with pytest.raises(ValueError, match=f"^unsupported model type '{model_type}': ") as refusal:
        load(tmp_path)
    said = str(refusal.value).removesuffix(WITHOUT)
    assert said.endswith(WORKS)
    assert is_generic(config.to_dict()) == (said != str(refusal.value))
    assert ": not supported yet: " in said
    for feature in TYPES[model_type]:
        assert feature in said


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_works_lacks_nothing(model_type: str) -> None:
    config = make_tiny_model(model_type).config.to_dict() | {"sliding_window": None}
    assert missing_features(config) == []


def test_odd_configs_are_read() -> None:
    odd: dict[str, Any] = {"text_config": 5, "layer_types": 3, "num_experts": "x"}
    odd |= {"rope_scaling": "y", "partial_rotary_factor": None, "sliding_window": True}
    assert missing_features(odd) == []


def test_quantised_weights(tmp_path: Path) -> None:
    make_tiny_model("llama").config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    path.write_text(json.dumps(config))
    said = "quantised with 'hqq', which are not supported yet; available: .* without the method"
    with pytest.raises(NotImplementedError, match=said):
        check_config_file(path)


@pytest.mark.parametrize(
    ("architecture", "metadata", "features"),
    [
        ("cohere2", {"attention.sliding_window": 512}, ["sliding-window layers"]),
        ("glm4moe", {"expert_count": 32}, [r"MoE \(num_experts=32\)"]),
        ("deepseek2", {"attention.kv_lora_rank": 512}, [r"MLA \(kv_lora_rank=512\)"]),
        ("falcon-h1", {"ssm.state_size": 128}, ["state-space layers"]),
    ],
)
def test_gguf_files(
    architecture: str, metadata: dict[str, Any], features: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    named = {f"{architecture}.{key}": value for key, value in metadata.items()}
    named["general.architecture"] = architecture
    write_gguf(path, make_tiny_model("llama"), byte_tokenizer(), metadata=named)
    for feature in features:
        said = f"unsupported model type '{architecture}': not supported yet: .*{feature}.*; avail"
        with pytest.raises(ValueError, match=said):
            gguf_config(read_gguf_header(path))
