"""Models of known shapes with random weights, made on the device that runs them.

How fast a model is depends on its shapes, not on its weights: this needs no checkpoint, and a model
of 8 billion parameters is there in seconds, since nothing is drawn on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.models.shape import ModelShape

_STD = 0.02  # as transformers draws them


def random_model(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None = 0,
    model_type: str | None = None,
) -> Any:
    """A stock model of transformers with random weights on `device`.

    With seed=None all weights are one small number: as fast to run, and made sooner on a CPU.

    The positions that decode steps need beyond `shape.max_context` are there, too: a benchmark
    starts its steps after the longest prompt.

    Args:
        model_type: "llama", "mixtral", "gemma3_text" or "gpt_oss"; None: the first, or the second
            if there are experts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = model_type or ("mixtral" if shape.num_experts else "llama")
    options: dict[str, Any] = {
        "intermediate_size": shape.intermediate_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    if shape.num_experts:
        options |= {
            "intermediate_size": shape.expert_size,
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
    if model_type in ("gemma3_text", "gpt_oss"):
        kinds = ("full_attention", "sliding_attention")
        options["layer_types"] = [kinds[window > 0] for window in shape.windows]
        options["sliding_window"] = max(shape.windows)
    if model_type == "gemma3_text":
        options["query_pre_attn_scalar"] = shape.head_dim
        options["rope_parameters"] = {
            "full_attention": {
                "rope_type": "linear",
                "factor": 8.0,
                "rope_theta": shape.rope_theta,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    if model_type == "gpt_oss":
        del options["rope_parameters"]  # its own are those of the model
    config = AutoConfig.for_model(
        model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_qo_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context + 4096,
        tie_word_embeddings=shape.ties_embeddings,
        use_cache=True,
        **options,
    )
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        stock = make.from_config(config, dtype=dtype)
    stock = stock.to_empty(device=device).eval()
    stock.tie_weights()
    # Buffers, which no checkpoint brings: frequencies, and what embeddings are multiplied with.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config).to(device)
    if model_type == "gemma3_text":
        embedding = stock.model.embed_tokens
        embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    generator = torch.Generator(device).manual_seed(seed or 0)
    with torch.no_grad():
        for name, weight in stock.named_parameters():
            if "norm" in name:
                weight.fill_(0.0 if model_type == "gemma3_text" else 1.0)  # there: 1 + weight
            elif seed is None:
                weight.fill_(1.0 / shape.hidden_size)
            else:
                weight.normal_(0.0, _STD, generator=generator)
    return stock.requires_grad_(False)
