"""Tiny random checkpoints of every supported model type, with a tokenizer of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
EOS_TOKEN = 257

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN,
    "pad_token_id": 258,
}

# name -> (model type, what differs from _SHAPE)
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases-rope": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}
# Those of families that transformers' modules run, too.
DENSE_MODELS = TINY_MODELS | {
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    "granite": (
        "granite",
        {
            "head_dim": 16,
            "embedding_multiplier": 0.3,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "rms_norm_eps": 0.05,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("olmo2", {"attention_bias": True, "head_dim": 16}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "phi3": ("phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}}),
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
        },
    ),
}
LEAN_MODELS = DENSE_MODELS | {
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "tie_word_embeddings": False}),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def make_tiny_model(name: str, **changes: Any) -> Any:
    """A stock model with random weights, large enough to make attention and logits peaked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, differences = LEAN_MODELS[name]
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **differences, **changes})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(0.0 if model_type == "gemma3_text" else 1.0, 0.2)
            else:
                is_wide = parameter_name.endswith(("bias", "sinks"))
                parameter.normal_(0.0, 0.5 if is_wide else 0.15)
    return model


def byte_tokenizer() -> Any:
    """Bytes are tokens 0..255, then <bos>, <eos>, <pad> and "he"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token for token, symbol in enumerate(alphabet)}
    specials = ("<bos>", "<eos>", "<pad>")
    vocab |= {special: 256 + i for i, special in enumerate(specials)}
    vocab["he"] = 259
    # The other ids of the model's vocabulary decode to something too.
    vocab |= {f"<{token}>": token for token in range(260, VOCAB_SIZE)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
    )


def save_long_model(folder: Path) -> Path:
    """A tiny llama of many positions, and its tokenizer."""
    make_tiny_model("llama", max_position_embeddings=65536).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """int64 tokens of the byte alphabet."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def write_gguf(
    path: Path,
    stock: Any,
    tokenizer: Any,
    *,
    edit: Callable[[dict[str, Any]], Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
) -> None:
    """Write a tiny model as llama.cpp's converter does, in float32.

    Args:
        edit: called with the tensors by their names in GGUF, before they are written.
        metadata: values by key, which replace those of the model; None leaves a key out.
        types: of matrices by the end of their names, such as {"ffn_up.weight": "Q4_0"}.
    """
    import gguf

    config = stock.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    tensors = _gguf_tensors(stock, architecture)
    rope, rope_divisors = _gguf_rope(config)
    if rope_divisors is not None:
        tensors = {"rope_freqs.weight": rope_divisors, **tensors}
    if edit is not None:
        edit(tensors)
    of_model = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        **rope,
    }
    if architecture == "llama":
        of_model["rope.dimension_count"] = config.head_dim
    values = {f"{architecture}.{key}": value for key, value in of_model.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokenizer.convert_ids_to_tokens(range(config.vocab_size)),
        "tokenizer.ggml.token_type": [1] * config.vocab_size,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (values | dict(metadata or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        kind = next((kind for end, kind in (types or {}).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            of_file = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(tensor, of_file), raw_dtype=of_file)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(stock: Any, architecture: str) -> dict[str, Any]:
    config = stock.config
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layer_names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{k}": f"blk.{layer}.{v}" for k, v in layer_names.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, tensor in stock.state_dict().items():
        module, _, kind = name.rpartition(".")
        gguf_name, weight = names[module], tensor.detach().numpy()
        num_heads = heads.get(gguf_name.rpartition(".")[2])
        if num_heads and architecture == "llama":
            # llama.cpp rotates neighbouring elements of these, transformers the two halves.
            halves = weight.reshape(num_heads, 2, config.head_dim // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if not (config.tie_word_embeddings and name == "lm_head.weight"):
            tensors[f"{gguf_name}.{kind}"] = weight
    return tensors


def _gguf_rope(config: Any) -> tuple[dict[str, Any], Any]:
    """Metadata of a model's rotary embedding, and rope_freqs for Llama 3's scaling."""
    rope = config.rope_parameters
    metadata = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
        }
    if rope["rope_type"] == "yarn":
        keys = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        metadata |= {
            f"rope.scaling.{key}": rope[name] for name, key in keys.items() if name in rope
        }
    if rope["rope_type"] != "llama3":
        return metadata, None
    base, factor = rope["rope_theta"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for frequency in 1.0 / base ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    ):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return metadata, torch.tensor(divisors, dtype=torch.float32).numpy()
