"""GGUF files of Gemma 4: what transformers' tables do not say of them.

Its layers that see all tokens have heads of another size and a rotary embedding of their own, and
keys without `_swa` are theirs. The converter writes norms as they are, not plus one.
"""

from __future__ import annotations

from typing import Any

from offload.loading.gguf_header import GgufHeader
from offload.loading.gguf_rope import ROPE_FREQS, positive_number, rope_parameters

GEMMA4_KEYS = {
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "top_k_experts",
}
# These are made of several, or only say again what others do.
GEMMA4_KNOWN = {
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
    "attention.value_length_swa",
    "feed_forward_length",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
}
_PER_LAYER = "per_layer_token_embd.weight"
_OF_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
_NEEDED = ("attention.key_length", "attention.key_length_swa", "attention.sliding_window",
           "attention.head_count_kv", "feed_forward_length", "rope.freq_base_swa")  # fmt: skip
_NEEDED_OF_EXPERTS = ("expert_used_count", "expert_feed_forward_length")


def gemma4_fields(header: GgufHeader, own: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Fields of its config beside those that have a key each.

    Args:
        own: its metadata, without the architecture's name.

    Raises:
        ValueError: metadata that is missing, or that transformers' layers do not compute.
    """
    num_experts = own.get("expert_count", 0)
    for key in _NEEDED + (_NEEDED_OF_EXPERTS if num_experts else ()):
        if key not in own:
            raise ValueError(f"gemma4.{key} is missing; take a newer conversion")
    for key, least, most in (
        ("attention.key_length", 2, 2**16),
        ("attention.key_length_swa", 2, 2**16),
        ("attention.sliding_window", 1, 2**31),
        ("attention.shared_kv_layers", 0, num_layers - 1),
        ("embedding_length_per_layer_input", 0, 2**24),
        ("expert_count", 0, 2**16),
        ("expert_used_count", 0, num_experts),
        ("expert_feed_forward_length", 0, 2**24),
    ):
        value = own.get(key, least)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"gemma4.{key} must be in {least}..{most}, got {value!r:.60}")
    pattern = own.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != num_layers or pattern[-1]:
        raise ValueError(
            f"gemma4.attention.sliding_window_pattern must tell of {num_layers} layers whether "
            f"they have windows, and that the last has none, got {pattern!r:.60}"
        )
    head_dim, window_dim = own["attention.key_length"], own["attention.key_length_swa"]
    for key, wanted in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("attention.value_length_swa", window_dim),
        ("rope.dimension_count_swa", window_dim),
    ):
        if own.get(key, wanted) != wanted:
            raise ValueError(
                f"gemma4.{key}={own[key]!r:.60} is not supported: the heads of these layers have "
                f"{wanted} elements"
            )
    if ROPE_FREQS not in header.tensors:
        raise ValueError(f"{ROPE_FREQS} is missing; take a newer conversion")
    rope = rope_parameters(header, "gemma4", head_dim, own["context_length"])
    if rope["rope_type"] not in ("default", "proportional"):
        raise ValueError(f"a scaled rotary embedding, {rope['rope_type']}, is not supported here")
    theta = positive_number(header.metadata, "gemma4.rope.freq_base_swa", 10000.0)
    fields: dict[str, Any] = {
        "layer_types": ["sliding_attention" if x else "full_attention" for x in pattern],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "hidden_size_per_layer_input": own.get("embedding_length_per_layer_input", 0),
        "enable_moe_block": bool(num_experts),
    }
    if _PER_LAYER in header.tensors:
        fields["vocab_size_per_layer_input"] = header.tensors[_PER_LAYER].shape[0]
    num_own = num_layers - own.get("attention.shared_kv_layers", 0)
    full = [i for i in range(num_own) if not pattern[i]]
    fields["attention_k_eq_v"] = bool(full) and f"blk.{full[0]}.attn_v.weight" not in header.tensors
    heads = _by_kind(own, "attention.head_count_kv", [bool(x) for x in pattern])
    fields |= {
        "num_key_value_heads": heads.get(True, heads[False]),
        "num_global_key_value_heads": heads[False],
    }
    if not fields["attention_k_eq_v"] and len(set(heads.values())) > 1:
        raise ValueError(
            f"gemma4.attention.head_count_kv={own['attention.head_count_kv']!r:.60} is not "
            "supported: layers with values of their own have the same number of heads"
        )
    widths = _by_kind(own, "feed_forward_length", [i >= num_own for i in range(num_layers)])
    fields["intermediate_size"] = widths.get(False, own["feed_forward_length"])
    fields["use_double_wide_mlp"] = widths.get(True) == 2 * fields["intermediate_size"]
    if not fields["use_double_wide_mlp"] and len(set(widths.values())) > 1:
        raise ValueError(
            f"gemma4.feed_forward_length={own['feed_forward_length']!r:.60} is not supported: "
            "layers that share keys and values have MLPs of the same width, or twice that"
        )
    return fields


def _by_kind(own: dict[str, Any], key: str, kinds: list[bool]) -> dict[bool, Any]:
    """What a key has for each kind of layer, whether it is one number or one of each layer."""
    values = own[key] if isinstance(own[key], list) else [own[key]] * len(kinds)
    found = dict(zip(kinds, values, strict=False))
    if values != [found[kind] for kind in kinds]:
        raise ValueError(f"gemma4.{key}={own[key]!r:.60} differs between layers of one kind")
    return found


def gemma4_names(config: Any) -> dict[str, str]:
    """Parameters of tensors that transformers' table leaves out; "" for tensors that are none."""
    names = {ROPE_FREQS: ""}
    for i, sharing in enumerate(config.kv_sharing_modes):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        if sharing == "reuse":  # files may have them, and nothing reads them
            names |= {f"{block}.{name}": "" for name in _OF_SHARED}
        names |= {
            f"{block}.ffn_gate_inp.scale": f"{layer}.router.scale",
            f"{block}.ffn_down_exps.scale": f"{layer}.router.per_expert_scale",
            f"{block}.ffn_gate_exps.weight": f"{layer}.experts.gate_up_proj",
            f"{block}.ffn_up_exps.weight": f"{layer}.experts.gate_up_proj",
        }
    return names
