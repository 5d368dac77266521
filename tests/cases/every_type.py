"""Tiny random models of any causal model type of transformers."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch

_LAYERS, _HIDDEN, _HEAD_DIM, _HEADS, _KV_HEADS, _VOCAB, _WINDOW = 4, 64, 16, 4, 2, 256, 16
MODEL_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
# Small sizes, by the names that configs give them.
_SIZES: list[tuple[int, str]] = [
    (_VOCAB, "vocab_size vocab_size_per_layer_input"),
    (1024, "n_positions n_ctx max_seq_len max_position_embeddings"),
    (512, "index_topk"),
    (
        _HIDDEN,
        """hidden_size d_model n_embd embed_dim dim word_embed_proj_dim embedding_size n_embed
        attention_hidden_size lru_width mamba_d_ssm emb_dim dim_model decoder_hidden_size""",
    ),
    (_LAYERS, f"{' '.join(MODEL_LAYERS)} num_decoder_layers"),
    (
        _HEADS,
        """num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads
        swa_num_attention_heads""",
    ),
    (
        _KV_HEADS,
        """num_key_value_heads num_kv_heads multi_query_group_num
        swa_num_key_value_heads""",
    ),
    (
        _HEAD_DIM,
        """d_kv head_dim kv_channels attention_head_dim attention_head_size v_head_dim
        dim_head swa_head_dim swa_v_head_dim qk_nope_head_dim index_head_dim linear_key_head_dim
        linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size
        o_lora_rank hidden_size_per_layer_input sliding_window sliding_window_size
        attention_chunk_size window_size local_attention attention_window_size""",
    ),
    (
        96,
        """intermediate_size ffn_dim n_inner inner_dim ffn_hidden_size d_ff dim_ff d_inner
        decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp prefix_dense_intermediate_size
        dense_intermediate_size""",
    ),
    (
        32,
        """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size kv_lora_rank
        q_lora_rank""",
    ),
    (24, "qk_head_dim"),
    (8, "qk_rope_head_dim mamba_n_heads mamba_num_heads rotary_dim"),
    (
        4,
        """num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads
        time_step_rank mamba_dt_rank""",
    ),
    (
        2,
        """num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts o_groups
        index_n_heads linear_num_key_heads mamba_expand expand altup_num_inputs
        type_vocab_size""",
    ),
    (
        1,
        """num_shared_experts n_shared_experts moe_num_shared_experts n_group topk_group
        num_expert_group zero_expert_num encoder_layers num_encoder_layers mamba_n_groups n_groups
        n_mamba_heads laurel_rank""",
    ),
    (0, "num_kv_shared_layers mtp_num_layers num_nextn_predict_layers"),
]
_FIELDS: dict[str, Any] = {name: size for size, names in _SIZES for name in names.split()}
_FIELDS |= dict.fromkeys(
    ("dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"),
    0.0,
)
_FIELDS |= {"initializer_range": 0.15, "use_mamba_kernels": False, "moe_latent_size": None}
_FIELDS["attn_logit_softcapping"] = 1.0  # near enough to scores to change tokens
_FIELDS |= {"ffn_config": None, "image_token_id": None}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_SLIDING = ["sliding_attention", "full_attention"] * 2
_MAMBA = dict.fromkeys(["attention_hidden_size"], 128) | {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_head_dim": 32,
    "num_key_value_heads": 4,
}
# What a type needs beside that.
_OF_TYPES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": _SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _SLIDING[:2]
        },
    },
    "ctrl": {"dff": 96},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_attention_heads": 4, "swa_num_attention_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * _LAYERS, "num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 32},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local"] * 2,
    },
    "granitemoe_swa": {"attention_multiplier": 0.25, "max_position_embeddings": 131072},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mpt": {"use_cache": True},
    "roc_bert": {"pronunciation_embed_dim": 32, "shape_embed_dim": 32},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": _MAMBA,
    "zamba2": _MAMBA | {"mamba_headdim": 16, "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3]},
}
# Sizes of the models beside a text model.
_MEDIA_SIZES = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
_MEDIA_SIZES |= dict.fromkeys(("num_attention_heads", "num_heads"), 2)
_MEDIA_SIZES |= dict.fromkeys(("num_hidden_layers", "depth", "num_global_layers"), 1)
_MEDIA_SIZES["out_hidden_size"] = _HIDDEN
_BY_LAYER = re.compile(r".*layer.*|block_types|full_attn_idxs|kv_sharing_modes|hybrid_override.*")


def _of_layers(values: list[Any]) -> list[Any]:
    """One value of each kind, in their order, then those that come next."""
    kinds = list({str(value): value for value in reversed(values)}.values())[::-1][:_LAYERS]
    return [*kinds, *values][:_LAYERS]


def _changes(config: Any, model_type: str) -> dict[str, Any]:
    fields, changes = vars(config), {}
    depth = next((fields[x] for x in MODEL_LAYERS if isinstance(fields.get(x), int)), 0)
    for name, value in fields.items():
        if isinstance(value, list | tuple):
            if depth and len(value) == depth and _BY_LAYER.fullmatch(name):
                changes[name] = _of_layers(list(value))
        elif name not in _FIELDS or isinstance(value, dict | bool):
            continue
        elif value is not None or name in ("head_dim", "num_key_value_heads"):
            changes[name] = _FIELDS[name]
    if fields.get("kv_lora_rank"):
        changes["num_key_value_heads"] = _HEADS
        if "head_dim" in changes:
            changes["head_dim"] = 8
    return changes | _TOKENS | _OF_TYPES.get(model_type, {})


def tiny_config(model_type: str) -> Any:
    """A config of `model_type` with small sizes and a layer of each kind, a decoder's."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    config = kind()
    text = config.get_text_config(decoder=True)
    changes = _changes(text, text.model_type if text.model_type in _OF_TYPES else model_type)
    if text is config:
        with contextlib.suppress(Exception):  # some take no such arguments, but can be written to
            config = text = kind(**changes)
    else:
        with contextlib.suppress(Exception):
            text = type(text)(**changes)
            config.text_config = text
    for name, value in changes.items():
        with contextlib.suppress(Exception):
            setattr(text, name, value)
    for media in ("vision_config", "audio_config"):
        for name, value in _MEDIA_SIZES.items():
            if hasattr(getattr(config, media, None), name):
                setattr(getattr(config, media), name, value)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def tiny_model_of(model_type: str, **changes: Any) -> Any:
    """A stock model of `model_type` in float32 with random weights; of a multi-modal type the whole
    model, if transformers has a class of it."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    make: Any = AutoModelForCausalLM.from_config if whole is None else whole._from_config
    return make(config).eval().float()
