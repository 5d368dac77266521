"""The config of the model in a GGUF file, and that the file holds its tensors and no others.

transformers' own reader is lenient: it takes defaults for what it does not find in the metadata,
drops tensors that it has no name for, and fills with random numbers what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from offload.loading.gguf_generic import GENERIC_ARCHITECTURES, GenericTensors, generic_config
from offload.loading.gguf_header import GgufHeader
from offload.loading.gguf_rope import ROPE_FREQS, rope_parameters
from offload.models.missing_features import unsupported_type

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp's names; it calls Mistral a llama
_MAX_SIZE = 2**24  # of any dimension; products of two stay far from 64 bits
_TOKENS = "tokenizer.ggml.tokens"
_SPECIAL_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_OTHER_ENDS = ("eot", "eom")
# Metadata of an architecture that changes what is computed, in ways that its type does not know.
_OTHER_COMPUTATIONS = {
    "attention.scale": "another scale of the scores",
    "attn_logit_softcapping": "a soft cap of logits",
    "final_logit_softcapping": "a soft cap of logits",
    "expert_count": "a mixture of experts, MoE",
}
# What an unsupported architecture may have, by the name that config.json has for it.
_FEATURES = {
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def gguf_config(header: GgufHeader) -> Any:
    """The transformers config of the model in a GGUF file.

    Raises:
        ValueError: an unsupported model, metadata that is missing or makes no sense, tensors that
            are missing, unexpected or of another shape: names the file and what is wrong.
    """
    from huggingface_hub.errors import StrictDataclassError  # from configs of transformers

    try:
        config = _config(header)
        if header.metadata["general.architecture"] in ARCHITECTURES:
            _check_tensors(header, config)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{header.path}: {error}") from error
    return config


def _config(header: GgufHeader) -> Any:
    from transformers import AutoConfig

    metadata, tensors = header.metadata, header.tensors
    if metadata.get("split.count", 0) not in (0, 1):  # the only metadata of all parts but the first
        raise ValueError(
            "the file is one part of several; merge them first (llama-gguf-split --merge)"
        )
    architecture = metadata.get("general.architecture")
    if architecture in GENERIC_ARCHITECTURES:
        return _generic(header, str(architecture))
    if architecture not in ARCHITECTURES:
        named, known = _as_config(metadata, str(architecture)), [*ARCHITECTURES]
        raise ValueError(
            unsupported_type(str(architecture), named, known + sorted(GENERIC_ARCHITECTURES))
        )
    num_heads = _size(metadata, f"{architecture}.attention.head_count")
    hidden_size = _size(metadata, f"{architecture}.embedding_length")
    max_context = _size(metadata, f"{architecture}.context_length")
    num_kv_heads = _size(metadata, f"{architecture}.attention.head_count_kv", num_heads)
    head_dim = _size(metadata, f"{architecture}.attention.key_length", hidden_size // num_heads)
    vocab_size = _vocab_size(metadata, architecture)
    _check_attention(metadata, architecture, num_heads, num_kv_heads, head_dim, max_context)
    config: dict[str, Any] = {
        "max_position_embeddings": max_context,
        "num_hidden_layers": _size(metadata, f"{architecture}.block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": _size(metadata, f"{architecture}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _number(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope_parameters(header, architecture, head_dim, max_context),
    }
    if architecture != "qwen2":  # which has the biases that it has
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    for name, of_file in _SPECIAL_TOKENS.items():
        config[name] = _token(metadata, f"tokenizer.ggml.{of_file}_token_id", vocab_size)
    for of_file in _OTHER_ENDS:
        _token(metadata, f"tokenizer.ggml.{of_file}_token_id", vocab_size)
    if config["num_hidden_layers"] > len(tensors):
        raise ValueError(
            f"{architecture}.block_count={config['num_hidden_layers']}, but the file holds "
            f"{len(tensors)} tensors"
        )
    return AutoConfig.for_model(architecture, **config)


def _generic(header: GgufHeader, architecture: str) -> Any:
    """The config of a type without lean layers, whose tensors the file holds."""
    metadata = header.metadata
    vocab_size = _vocab_size(metadata, architecture)
    num_layers = _size(metadata, f"{architecture}.block_count")
    if num_layers > len(header.tensors):
        raise ValueError(
            f"{architecture}.block_count={num_layers}, but the file holds "
            f"{len(header.tensors)} tensors"
        )
    tokens = {name: _token(metadata, f"tokenizer.ggml.{of_file}_token_id", vocab_size)
              for name, of_file in _SPECIAL_TOKENS.items()}  # fmt: skip
    config = generic_config(header, architecture, vocab_size, tokens)
    GenericTensors(header, empty_model(config, torch.bfloat16))
    return config


def _check_attention(
    metadata: dict[str, Any],
    architecture: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
) -> None:
    """Refuse heads that do not fit together, and what the lean layers do not compute."""
    if num_heads % num_kv_heads or head_dim % 2 or num_heads * head_dim > _MAX_SIZE:
        raise ValueError(
            f"{num_heads} query heads, {num_kv_heads} KV heads and head_dim={head_dim} make no "
            "attention"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if _size(metadata, f"{architecture}.{key}", head_dim) != head_dim:
            raise ValueError(
                f"{architecture}.{key}={metadata[f'{architecture}.{key}']} is not supported: the "
                f"heads have {head_dim} elements"
            )
    window = _size(metadata, f"{architecture}.attention.sliding_window", max_context)
    if window < max_context:
        raise ValueError(
            f"{architecture}.attention.sliding_window={window} is not supported yet: "
            f"sliding-window layers, in a context of {max_context} tokens; take a model without"
        )
    for key, what in _OTHER_COMPUTATIONS.items():
        value = metadata.get(f"{architecture}.{key}")
        if value:
            raise ValueError(
                f"{architecture}.{key}={value} is not supported yet: {what}; take a model without"
            )


def _as_config(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What config.json would say of the features that `missing_features` knows."""
    named = {name: metadata.get(f"{architecture}.{key}") for name, key in _FEATURES.items()}
    named = {name: int(x) if isinstance(x, np.integer) else x for name, x in named.items()}
    if any(key.startswith(f"{architecture}.ssm.") for key in metadata):
        named["ssm.state_size"] = metadata.get(f"{architecture}.ssm.state_size", 1)
    return named | {"model_type": architecture.replace("-", "_")}


def _check_tensors(header: GgufHeader, config: Any) -> None:
    """Refuse a file whose tensors are not those of the config."""
    model = empty_model(config, torch.bfloat16)
    expected = {
        of: tuple(model.get_parameter(name).shape) for name, of in gguf_names(model).items()
    }
    found = {name: of.shape for name, of in header.tensors.items() if name != ROPE_FREQS}
    shapes = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        _some("missing", expected.keys() - found.keys()),
        _some("unexpected", found.keys() - expected.keys()),
        _some("of another shape", shapes),
    ]
    if any(problems):
        raise ValueError(
            f"the tensors are not those of its metadata: {'; '.join(filter(None, problems))}"
        )


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The stock model of a config, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return model.from_config(config, dtype=dtype)


def gguf_names(model: Any) -> dict[str, str]:
    """The names of a stock model's parameters, tied ones once, and what GGUF calls each."""
    name_of = gguf_naming(model.config.model_type, model.config.num_hidden_layers)
    return {name: name_of(name) for name, _ in model.named_parameters()}


def gguf_naming(model_type: str, num_layers: int) -> Callable[[str], str]:
    """From the name of a stock model's parameter to what GGUF calls it."""
    import gguf

    (architecture,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model_type)
    names = gguf.get_tensor_name_map(architecture, num_layers)

    def name_of(parameter: str) -> str:
        module, _, kind = parameter.rpartition(".")
        return f"{names.get_name(module)}.{kind}"

    return name_of


def _some(problem: str, names: Iterable[str]) -> str:
    names = sorted(names)
    more = ", …" if len(names) > 3 else ""
    return f"{len(names)} {problem} ({', '.join(names[:3])}{more})" if names else ""


def _size(metadata: dict[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise ValueError(f"{key} must be an integer in 1..{_MAX_SIZE}, got {_shown(value)}")
    return value


def _number(metadata: dict[str, Any], key: str) -> float:
    value = metadata.get(key)
    if not isinstance(value, float) or not 0.0 <= value < math.inf:
        raise ValueError(f"{key} must be a finite number, got {_shown(value)}")
    return value


def _vocab_size(metadata: dict[str, Any], architecture: str) -> int:
    tokens = metadata.get(_TOKENS)
    if not isinstance(tokens, list):
        raise ValueError(f"{_TOKENS} must be a list of strings, got {_shown(tokens)}")
    vocab_size = _size(metadata, f"{architecture}.vocab_size", len(tokens))
    if vocab_size < len(tokens):
        raise ValueError(f"{len(tokens)} tokens do not fit {architecture}.vocab_size={vocab_size}")
    return vocab_size


def _token(metadata: dict[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(key)
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise ValueError(f"{key} must be a token of 0..{vocab_size - 1}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value as a message has it; None is nothing there."""
    return "nothing" if value is None else f"{value!r:.60}"
