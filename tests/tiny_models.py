"""Tiny random checkpoints of every supported model type, with a tokenizer of bytes."""

from __future__ import annotations

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


def make_tiny_model(name: str, **changes: Any) -> Any:
    """A stock model with random weights, large enough to make attention and logits peaked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, differences = TINY_MODELS[name]
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **differences, **changes})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.5 if parameter_name.endswith("bias") else 0.15)
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


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """int64 tokens of the byte alphabet."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def write_gguf(path: Path, stock: Any, tokenizer: Any) -> None:
    """Write a tiny llama as llama.cpp's converter does, in float32."""
    import gguf

    config, weights = stock.config, {k: v.detach().numpy() for k, v in stock.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(config.vocab_size)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layer_names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{k}": f"blk.{layer}.{v}" for k, v in layer_names.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in weights.items():
        gguf_name = names[name.removesuffix(".weight")]
        num_heads = heads.get(gguf_name.rpartition(".")[2])
        if num_heads:  # llama.cpp rotates neighbouring elements, transformers the two halves
            halves = weight.reshape(num_heads, 2, config.head_dim // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if not (config.tie_word_embeddings and name == "lm_head.weight"):
            writer.add_tensor(f"{gguf_name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
