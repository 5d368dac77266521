"""GGUF files of types without lean layers, written here as llama.cpp's converter does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cases.every_type import tiny_model_of
from cases.tiny_models import VOCAB_SIZE, byte_tokenizer, make_tiny_model, random_tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

from offload import OffloadedModel, load_tokenizer
from offload.loading.generic_packing import parameter_bytes
from offload.loading.gguf_rope import _scaling_of
from offload.loading.planned_model import planned_model, planned_skeleton
from offload.models import is_generic
from offload.models.dtypes import AUTO_ON_GPU
from offload.models.packed_linear import PackedMatrix
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.config import RuntimeConfig

_QWEN35: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
pytestmark = pytest.mark.usefixtures("cache")
_SIX = ["sliding_attention"] * 5 + ["full_attention"]
_THREE = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": _THREE * 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 50000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
# As the sizes that there are: what each has beside layers of two kinds.
GEMMA4: dict[str, dict[str, Any]] = {
    "31B": {},
    "26B-A4B": {
        "num_hidden_layers": 3,
        "layer_types": _THREE,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "E2B": {
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "E4B": {
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 3,
    },
}
# By llama.cpp's name: transformers', and what the tiny model has other than by default.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "layer_types": _SIX}),
    **{f"gemma4 {size}": ("gemma4_text", _GEMMA4 | more) for size, more in GEMMA4.items()},
    "gemma2": ("gemma2", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen2moe": ("qwen2_moe", {}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 64}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "qwen35": ("qwen3_5_text", _QWEN35),
    "qwen35moe": ("qwen3_5_moe_text", _QWEN35),
}
_PLUS_ONE = ("gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")


def quantised(values: Tensor, kind: str) -> Tensor:
    """The numbers that a file keeps of values."""
    of_file = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), of_file), of_file))


def file_tensors(model: Any, architecture: str) -> dict[str, Tensor]:
    config = model.config
    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    made: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        layer = name.split(".")[2] if ".layers." in name else ""
        value = value.detach().float()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind in ("layer_scalar", "scale", "per_expert_scale"):  # gemma4's
            renamed = {"layer_scalar": "layer_output_scale.weight", "scale": "ffn_gate_inp.scale"}
            made[f"blk.{layer}.{renamed.get(kind, 'ffn_down_exps.scale')}"] = value
            continue
        is_whole = architecture == "gemma4" and layer != "1"  # files have either
        if is_whole and name.endswith("experts.gate_up_proj"):
            made[f"blk.{layer}.ffn_gate_up_exps.weight"] = value
            continue
        if ".experts." in name:
            bias = "bias" if name.endswith("_bias") else "weight"
            if architecture == "gpt-oss" and bias == "weight":
                value = value.transpose(1, 2)
            if "gate_up" in name:
                is_oss = architecture == "gpt-oss"
                gate, up = (value[:, i::2] for i in (0, 1)) if is_oss else value.chunk(2, 1)
                made[f"blk.{layer}.ffn_gate_exps.{bias}"] = gate
                made[f"blk.{layer}.ffn_up_exps.{bias}"] = up
            else:
                made[f"blk.{layer}.ffn_down_exps.{bias}"] = value
            continue
        if architecture in _PLUS_ONE and "norm" in name and kind == "weight":
            value = value + 1 if "linear_attn" not in name else value
        if ".linear_attn." in name:
            value = tiled(value, name, config)
            if name.endswith("A_log"):
                value = -value.exp()
        if "conv1d" in name or name.endswith("conv.conv.weight"):
            value = value.squeeze(1)
        if kind in ("A_log", "dt_bias", "sinks"):
            renamed = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "sinks": "attn_sinks.weight"}
            made[f"blk.{layer}.{renamed[kind]}"] = value
            continue
        of_file = names.get_name(owner)
        assert of_file is not None, name
        made[f"{of_file}.{kind}"] = value
    if architecture == "gemma4":
        for i in range(
            config.num_hidden_layers - config.num_kv_shared_layers, len(config.layer_types)
        ):
            made[f"blk.{i}.attn_k_norm.weight"] = torch.ones(8)  # files have what nothing reads
        # Of layers without windows, of whose heads a part rotates.
        rope = config.rope_parameters["full_attention"]
        num_all = config.per_layer_config["full_attention"].head_dim // 2
        made["rope_freqs.weight"] = torch.full((num_all,), 1e30)
        made["rope_freqs.weight"][: int(num_all * rope["partial_rotary_factor"])] = 1.0
    return made


def tiled(value: Tensor, name: str, config: Any) -> Tensor:
    """Value heads of one key head are neighbours in transformers, and apart in llama.cpp."""
    if re.search(r"norm\.weight$", name):
        return value
    heads = (
        config.linear_num_key_heads,
        config.linear_num_value_heads // config.linear_num_key_heads,
    )
    dim = 1 if re.search("in_proj_[ab]|A_log|dt_bias", name) else config.linear_value_head_dim
    if "out_proj" in name:
        return value.unflatten(1, (*heads, dim)).transpose(1, 2).flatten(1, 3)
    count = heads[0] * heads[1] * dim
    first, last = value[:-count], value[-count:]
    return torch.cat([first, last.unflatten(0, (*heads, dim)).transpose(0, 1).flatten(0, 2)])


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    one = config.per_layer_config["sliding_attention"] if architecture == "gemma4" else config

    def of(*names: str) -> Any:
        return next((getattr(one, n) for n in names if getattr(one, n, None) is not None), None)

    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    heads = of("num_attention_heads")
    head_dim = of("head_dim") or config.hidden_size // heads
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": of("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": of("num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": of("rms_norm_eps"),
        "attention.layer_norm_epsilon": None,
        "attention.sliding_window": of("sliding_window"),
        "attn_logit_softcapping": of("attn_logit_softcapping"),
        "final_logit_softcapping": of("final_logit_softcapping"),
        "expert_count": of("num_experts", "num_local_experts"),
        "expert_used_count": of("num_experts_per_tok"),
        "expert_feed_forward_length": of("moe_intermediate_size"),
        "expert_shared_feed_forward_length": of("shared_expert_intermediate_size"),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if architecture in ("starcoder2", "stablelm", "nemotron"):
        values["attention.layer_norm_epsilon"] = of("norm_epsilon", "layer_norm_eps", "norm_eps")
    if architecture == "gpt-oss":
        values |= {
            "expert_feed_forward_length": config.intermediate_size,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if architecture == "gemma4":
        is_window = [kind == "sliding_attention" for kind in config.layer_types]
        full = config.per_layer_config["full_attention"]
        num_own = config.num_hidden_layers - config.num_kv_shared_layers
        width = config.intermediate_size
        values |= {
            "attention.shared_kv_layers": config.num_kv_shared_layers,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "attention.sliding_window_pattern": is_window,
            "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
            "rope.dimension_count": full.head_dim,
            "rope.dimension_count_swa": head_dim,
            "attention.key_length": full.head_dim,
            "attention.value_length": full.head_dim,
            "attention.key_length_swa": head_dim,
            "attention.value_length_swa": head_dim,
            "expert_used_count": config.top_k_experts,
        }
        if not config.enable_moe_block:
            dense = ("expert_count", "expert_used_count", "expert_feed_forward_length")
            values |= dict.fromkeys(dense)
        if config.use_double_wide_mlp:
            widths = [width * (1 + (i >= num_own)) for i in range(config.num_hidden_layers)]
            values["feed_forward_length"] = widths
        if config.attention_k_eq_v:
            values["attention.head_count_kv"] = [
                one.num_key_value_heads if window else full.num_key_value_heads
                for window in is_window
            ]
    if architecture == "lfm2":
        del values["attention.key_length"]
        values["shortconv.l_cache"] = config.conv_L_cache
        values["attention.layer_norm_rms_epsilon"] = config.norm_eps
        values["attention.head_count_kv"] = [
            config.num_key_value_heads if kind == "full_attention" else 0
            for kind in config.layer_types
        ]
    if architecture.startswith("qwen35"):
        values |= {
            "full_attention_interval": 4,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "rope.dimension_sections": [*rope["mrope_section"], 0],
        }
    return values


def write(path: Path, architecture: str, kind: str, **more: Any) -> Any:
    """A file with matrices of a type; returns the model that it stands for."""
    model_type, changes = MODELS[architecture]
    architecture = architecture.split()[0]
    if architecture.startswith("qwen35"):
        changes = changes | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    if architecture == "gemma3":
        changes = changes | {"query_pre_attn_scalar": 16}
    if architecture == "gemma2":
        changes = changes | {"query_pre_attn_scalar": 16}
    if architecture == "gpt-oss":
        changes = changes | {"max_position_embeddings": 8192}
    torch.manual_seed(2)
    make: Any = make_tiny_model if architecture == "gemma4" else tiny_model_of
    model = make(model_type, vocab_size=VOCAB_SIZE, **changes).eval().requires_grad_(False)
    for name, value in model.state_dict().items():
        is_expert = value.dim() == 3 and "experts" in name
        if name.endswith("scale"):
            value.uniform_(0.75, 1.25)
        # Few tokens turn by the rounding of their inputs.
        if is_expert or "post_feedforward_layernorm_2" in name:
            value /= 4
        if value.dim() == 2 or is_expert:
            is_oss = architecture == "gpt-oss" and is_expert
            numbers = quantised(value.transpose(1, 2).contiguous() if is_oss else value, kind)
            value.copy_(numbers.transpose(1, 2) if is_oss else numbers)
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{k}": v for k, v in metadata_of(model.config, architecture).items()}
    tokenizer = byte_tokenizer()
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE)),
        "tokenizer.ggml.token_type": [1] * VOCAB_SIZE,
        "tokenizer.ggml.merges": ["h e"],
    }
    for key, value in (values | more).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    of_file = gguf.GGMLQuantizationType[kind]
    for name, value in file_tensors(model, architecture).items():
        data = np.ascontiguousarray(value.numpy())
        is_matrix = value.dim() > 1 and "ffn_gate_inp" not in name and name.endswith("weight")
        if is_matrix and "conv1d" not in name and "conv.conv" not in name:
            writer.add_tensor(name, gguf.quantize(data, of_file), raw_dtype=of_file)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("architecture", MODELS)
def test_the_model_is_that_of_the_file(architecture: str, tmp_path: Path) -> None:
    stock = write(tmp_path / "tiny.gguf", architecture, "Q8_0")
    model = OffloadedModel.from_pretrained(tmp_path / "tiny.gguf", num_threads=1, dtype="float32")
    name = str(tmp_path / "tiny.gguf")
    planned: Any = planned_skeleton(name, "float32")
    if planned is None:
        num_bytes = planned_model(name, "float32").weight_bytes
    else:
        num_bytes = sum(parameter_bytes(*planned).values())
    assert num_bytes == weight_bytes_of(model)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedMatrix)}
    linears = {n for n, m in stock.named_modules() if type(m) in (nn.Linear, nn.Embedding)}
    float32 = ("shared_expert_gate", "router.proj")  # in files
    linears = {name for name in linears if not name.endswith(float32)}
    experts = {n for n, _ in stock.named_parameters() if n.endswith("_proj")}
    if architecture.startswith("gemma"):
        linears |= {n for n, _ in stock.named_modules() if ".embed_tokens" in n}
    assert packed.keys() == linears | experts
    state = stock.state_dict()
    for name, module in packed.items():
        expected = state[module.stock_name(name)]
        assert relative(module.of_stock(), expected) < 1e-3, name
    for name, value in model.named_parameters():
        if name in state:
            assert torch.allclose(value, state[name], rtol=1e-5, atol=1e-6), name
    ids = random_tokens(30, seed=1).unsqueeze(0)
    wanted = stock(ids).logits[0]
    cache = model.new_cache()
    parts = ids.split([26, 1, 1, 1, 1], 1)
    steps = [model(part, past_key_values=cache).logits[0] for part in parts]
    assert relative(torch.cat(steps), wanted) < 0.05
    assert load_tokenizer(tmp_path / "tiny.gguf").decode([72, 105])


@pytest.mark.parametrize("size", GEMMA4)
def test_gemma4_with_the_files_numbers(size: str, tmp_path: Path) -> None:
    """Without the rounding of packed weights' inputs, which turns experts."""
    stock = write(tmp_path / "tiny.gguf", f"gemma4 {size}", "F32")
    model = OffloadedModel.from_pretrained(tmp_path / "tiny.gguf", num_threads=1, dtype="float32")
    assert is_generic(model.config.to_dict()) == (size != "31B")
    ids = random_tokens(60, seed=1).unsqueeze(0)
    cache = model.new_cache()
    steps = [model(x, past_key_values=cache).logits[0] for x in ids.split([40, 17, 1, 1, 1], 1)]
    assert relative(torch.cat(steps), stock(ids).logits[0]) < 1e-4


@pytest.mark.parametrize(
    "architecture",
    ["gemma3", "gemma4 31B", "gemma4 E4B", "qwen3moe", "lfm2", "qwen35", "qwen35moe"],
)
def test_as_transformers_dequantises_it(architecture: str, tmp_path: Path) -> None:
    """Of the types that people run in 4 bits, with blocks that keep their numbers."""
    stock = write(tmp_path / "tiny.gguf", architecture, "Q4_0", **{"general.name": "tiny"})
    model = OffloadedModel.from_pretrained(tmp_path / "tiny.gguf", num_threads=1, dtype="float32")
    given = {}
    if architecture.startswith(("gemma", "qwen3moe")):
        # transformers' own config has the 256 of the largest for each head, 768 for each expert.
        given = {"config": type(model.config).from_dict(model.config.to_dict())}
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, **given
    ).eval()
    for name, value in expected.named_buffers():
        if name.endswith("layer_scalar"):  # which transformers does not find
            value.copy_(stock.get_buffer(name))
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedMatrix)}
    assert packed
    state = expected.state_dict()
    for name, module in packed.items():
        assert module.packed.format == "q4"
        found = module.of_stock()
        assert torch.allclose(found, state[module.stock_name(name)], atol=1e-3), name
    for name, value in model.named_parameters():
        assert name not in state or torch.allclose(value, state[name], atol=1e-6), name
    ids = random_tokens(30, seed=1).unsqueeze(0)
    for each in (expected, model):
        each.generation_config.eos_token_id = None
    with torch.no_grad():
        wanted = expected(ids).logits[0]
    assert relative(model(ids).logits[0], wanted) < 0.05
    assert model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).shape == (1, 35)


@pytest.mark.skipif("qwen35moe" not in GGUF_CONFIG_ARCHS, reason="transformers < 5.23")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_on_the_host(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuntimeConfig, "packing", AUTO_ON_GPU)  # inline, too
    stock = write(tmp_path / "tiny.gguf", "qwen35moe", kind)
    options = {"device": device, "backend": "inline" if device == "cpu" else None}
    options |= {"num_threads": 1, "dtype": "float32", "host_experts": 3}
    model = OffloadedModel.from_pretrained(tmp_path / "tiny.gguf", **options)
    for i, layer in enumerate(model.model.layers):
        matrix = layer.mlp.experts.gate_up_proj
        assert matrix.packed.format == {"Q8_0": "q8", "Q4_0": "q4"}[kind]
        assert matrix.codes.device.type == ("cpu" if i < 3 else device)
    ids = random_tokens(60, seed=1).unsqueeze(0)
    cache = model.new_cache()
    parts = [model(x, past_key_values=cache).logits[0] for x in ids.split([40, 16, 1, 1, 1, 1], 1)]
    assert relative(torch.cat(parts).cpu(), stock(ids).logits[0]) < 0.05


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("gemma3", {"attention.scale": 2.0}, r"gemma3\.attention\.scale=2\.0 is not known here"),
        ("gemma3", {"block_count": 2}, r"unexpected, model\.layers\.2|no place|unexpected"),
        (
            "gemma3",
            {"feed_forward_length": 64},
            r"blk\.0\.ffn_(up|gate|down)\.weight of .* instead",
        ),
        ("gemma3", {"embedding_length": "x"}, r"embedding_length must be an integer"),
        ("gemma4 31B", {"attention.scale": 2.0}, r"attention\.scale=2\.0 is not known here"),
        (
            "gemma4 31B",
            {"attn_logit_softcapping": 9.0},
            r"attn_logit_softcapping=9\.0 is not known",
        ),
        ("gemma4 31B", {"attention.key_length_swa": "x"}, r"key_length_swa must be in 2\.\."),
        ("gemma4 31B", {"rope.dimension_count": 16}, r"rope\.dimension_count=16 is not supported"),
        ("gemma4 31B", {"rope.scaling.factor": 8.0}, r"rope_freqs\.weight beside"),
        ("gemma4 31B", {"attention.sliding_window_pattern": [True] * 6}, r"the last has none"),
        ("gemma4 31B", {"attention.head_count_kv": [2, 1] * 3}, r"layers of one kind"),
        ("gemma4 26B-A4B", {"expert_used_count": 5}, r"expert_used_count must be in 0\.\.4"),
        ("gemma4 E2B", {"attention.head_count_kv": [2, 2, 1] * 2}, r"the same number of heads"),
        ("gemma4 E2B", {"attention.shared_kv_layers": 6}, r"shared_kv_layers must be in 0\.\.5"),
        ("gemma4 E2B", {"feed_forward_length": [96] * 3 + [128] * 3}, r"or twice that"),
    ],
)
def test_refusals(architecture: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    of_file = {f"{architecture.split()[0]}.{key}": value for key, value in more.items()}
    write(tmp_path / "tiny.gguf", architecture, "Q8_0", **of_file)
    with pytest.raises(ValueError, match=message):
        OffloadedModel.from_pretrained(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("num_rotated", "of"), [(64, 256), (15, 22)])
def test_the_part_of_a_head_that_rotates(num_rotated: int, of: int) -> None:
    divisors = np.where(np.arange(of) < num_rotated, 1.0, 1e30)
    found = _scaling_of(divisors, 1e6, 512)
    assert found["rope_type"] == "proportional"
    assert int(found["partial_rotary_factor"] * 2 * of // 2) == num_rotated  # transformers' count


def test_another_architecture(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "gemma3", "Q8_0", **{"general.architecture": "falcon"})
    with pytest.raises(ValueError, match=r"'falcon'.*available: .*gemma4.*qwen35moe"):
        OffloadedModel.from_pretrained(tmp_path / "tiny.gguf")
