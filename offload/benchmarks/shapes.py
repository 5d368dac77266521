"""Models of known shapes with random weights, made on the device that runs them.

How fast a model is depends on its shapes, not on its weights: this needs no checkpoint, and a model
of 8 billion parameters is there in seconds, since nothing is drawn on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_STD = 0.02  # as transformers draws them


@dataclass(frozen=True)
class ModelShape:
    """What decides the work of a Llama-like model."""

    num_layers: int
    hidden_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rope_theta: float

    @property
    def kv_token_bytes(self) -> int:
        """Of one token's keys and values in all layers, in a dtype of two bytes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def qkv_width(self) -> int:
        """Elements that a layer projects for one token: queries, keys and values."""
        return (self.num_qo_heads + 2 * self.num_kv_heads) * self.head_dim


MODEL_SHAPES = {
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072, 500000.0),
    "llama-3.2-1b": ModelShape(16, 2048, 32, 8, 64, 8192, 128256, 131072, 500000.0),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192, 100000.0),
    "tiny": ModelShape(4, 128, 4, 2, 32, 256, 512, 8192, 10000.0),
}


def random_model(
    shape: ModelShape, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Any:
    """A stock `LlamaForCausalLM` of transformers with random weights on `device`.

    The positions that decode steps need beyond `shape.max_context` are there, too: a benchmark
    starts its steps after the longest prompt.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_qo_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context + 4096,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        use_cache=True,
    )
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM
    with torch.device("meta"):
        stock = model(config).to(dtype)
    stock = stock.to_empty(device=device).eval()
    # Its frequencies are a buffer, and no checkpoint brings them.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in stock.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, _STD, generator=generator)
    return stock.requires_grad_(False)
