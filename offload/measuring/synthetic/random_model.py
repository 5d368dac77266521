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
    shape: ModelShape, *, device: torch.device, dtype: torch.dtype, seed: int | None = 0
) -> Any:
    """A stock `LlamaForCausalLM` of transformers, or a `MixtralForCausalLM` if there are experts,
    with random weights on `device`.

    With seed=None all weights are one small number: as fast to run, and made sooner on a CPU.

    The positions that decode steps need beyond `shape.max_context` are there, too: a benchmark
    starts its steps after the longest prompt.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    config_of: Any = LlamaConfig
    model: Any = LlamaForCausalLM
    of_experts: dict[str, int] = {}
    if shape.num_experts:
        config_of, model = MixtralConfig, MixtralForCausalLM
        of_experts = {
            "intermediate_size": shape.expert_size,
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
    config = config_of(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        **{"intermediate_size": shape.intermediate_size, **of_experts},
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_qo_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context + 4096,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.ties_embeddings,
        use_cache=True,
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        stock = model(config).to(dtype)
    stock = stock.to_empty(device=device).eval()
    stock.tie_weights()
    # Its frequencies are a buffer, and no checkpoint brings them.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed or 0)
    with torch.no_grad():
        for name, weight in stock.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            elif seed is None:
                weight.fill_(1.0 / shape.hidden_size)
            else:
                weight.normal_(0.0, _STD, generator=generator)
    return stock.requires_grad_(False)
