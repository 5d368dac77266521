"""What a model has that the lean layers do not compute, in words, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of model types whose config does not say it.
_OF_TYPES = {
    "gemma": "RMSNorms of another kind, scaled embeddings",
    "gemma2": "RMSNorms around each block, scaled embeddings",
    "mamba": "state-space layers instead of attention",
    "mamba2": "state-space layers instead of attention",
    "phi4_multimodal": "fused projections (qkv_proj, gate_up_proj)",
}
# Causal types of transformers that its own modules cannot run here.
_WITHOUT_CACHE = "falcon_mamba mamba mamba2 recurrent_gemma rwkv xlstm"
_WITHOUT_INTERFACE = """big_bird codegen gpt_neo gpt_neox_japanese gptj
    megatron-bert mvp openai-gpt prophetnet reformer rembert roformer trocr xglm xlm xlnet"""
_OF_PARTS = "blt gemma4_assistant gemma4_unified_assistant git moshi"
NEVER_GENERIC = frozenset(f"{_WITHOUT_CACHE} {_WITHOUT_INTERFACE} {_OF_PARTS}".split())
# Those whose modules compute attention themselves, and are taken over (`offload.decode.alibi`).
OWN_ATTENTION = frozenset(("bloom", "falcon", "mpt"))
# Those whose state-space layers begin with empty states where several tokens come behind others.
READ_AT_ONCE = frozenset(("bamba", "jamba", "zamba"))
_OTHER_LAYERS = {
    "linear_attention": "linear attention",
    "chunked_attention": "chunked attention",
    "indexed_attention": "attention by an indexer",
}
MEDIA = {"vision_config": "images", "audio_config": "audio", "video_config": "video"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_STATE_SPACE = ("mamba_d_state", "mamba_d_ssm", "ssm_cfg", "ssm.state_size", "state_size")
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def missing_features(config: Mapping[str, Any]) -> list[str]:
    """`["sliding-window layers (sliding_window=512)", …]`; empty if no key tells what it is.

    Args:
        config: the content of config.json; of a multi-modal model, its text_config is read, too.
    """
    text = config.get("text_config")
    merged: dict[str, Any] = {**config, **(text if isinstance(text, Mapping) else {})}
    media = [name for key, name in MEDIA.items() if config.get(key)]
    found = [f"{' and '.join(media)} beside text"] if media else []
    if config.get("is_encoder_decoder"):
        found.append("an encoder beside the decoder")
    found += _other_attention(merged)
    experts = next((name for name in _EXPERTS if _is_size(merged.get(name))), None)
    if experts is not None:
        found.append(f"a mixture of experts, MoE ({experts}={merged[experts]})")
    caps = [f"{name}={merged[name]}" for name in _SOFT_CAPS if merged.get(name)]
    if caps:
        found.append(f"soft caps of logits ({', '.join(caps)})")
    rope = merged.get("rope_parameters") or merged.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    rotated = rope.get("partial_rotary_factor", merged.get("partial_rotary_factor", 1))
    if isinstance(rotated, int | float) and rotated < 1:
        found.append(f"rotary embeddings of a part of each head (partial_rotary_factor={rotated})")
    if "mrope_section" in rope:
        found.append("rotary embeddings of several axes (mrope_section)")
    activation = merged.get("hidden_activation") or merged.get("hidden_act") or "silu"
    if activation not in ("silu", "swish") and not config.get("is_encoder_decoder"):
        found.append(f"the activation {activation}")
    of_type = _OF_TYPES.get(str(config.get("model_type")))
    return [*found, *([of_type] if of_type else [])]


def _other_attention(config: Mapping[str, Any]) -> list[str]:
    found = []
    layer_types = config.get("layer_types")
    types = set(map(str, layer_types)) if isinstance(layer_types, list | tuple) else None
    window = config.get("sliding_window")
    slides = types is None or "sliding_attention" in types
    if _is_size(window) and slides and config.get("use_sliding_window", True):
        found.append(f"sliding-window layers (sliding_window={window})")
    others = {name: what for name, what in _OTHER_LAYERS.items() if name in (types or ())}
    if not others and _is_size(config.get("linear_num_value_heads")):
        others = {"linear_num_value_heads": "linear attention"}
    found += [f"layers of {what}" for what in others.values()]
    state = next((name for name in _STATE_SPACE if config.get(name)), None)
    if state is not None and config.get("model_type") not in ("mamba", "mamba2"):
        found.append(f"state-space layers ({state})")
    if _is_size(config.get("kv_lora_rank")):
        rank = config["kv_lora_rank"]
        found.append(f"multi-head latent attention, MLA (kv_lora_rank={rank})")
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def has_alibi(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a type whose positions are biases of scores (ALiBi)."""
    model_type = config.get("model_type")
    return model_type in OWN_ATTENTION and bool(config.get("alibi", model_type != "falcon"))


def unsupported_type(model_type: str, config: Mapping[str, Any], available: list[str]) -> str:
    """The refusal of a model type: what it has that is missing here, and which models work."""
    missing = missing_features(config)
    if not missing and model_type in NEVER_GENERIC:
        missing = ["attention of a class without AttentionInterface, or none"]
    said = f": not supported yet: {'; '.join(missing)}" if missing else ""
    return (
        f"unsupported model type {model_type!r}{said}; available: {', '.join(available)} "
        "(dense models of text, such as Llama 3, SmolLM2, Mistral, Qwen2.5 and Qwen3)"
    )


def unsupported_generic(model_type: str, reason: str) -> str:
    """The refusal of a type without lean layers whose own modules do not work here."""
    return (
        f"unsupported model type {model_type!r}: {reason}; docs/models.md lists the types that work"
    )


def quantised_weights(method: str) -> str:
    """What is said of weights that are quantised by `method`: what is missing, and what to do."""
    return (
        f"weights quantised with {method!r}, which are not supported yet; available: plain "
        "safetensors in bfloat16, float16 or float32 (often the repository without the method in "
        "its name), those of gptq, awq, fp8, compressed-tensors, mxfp4 and bitsandbytes with 4 "
        "bits, and GGUF files"
    )
