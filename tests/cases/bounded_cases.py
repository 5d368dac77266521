"""Steps of models whose sequences have a bound, and what is in their caches."""

from __future__ import annotations

from typing import Any

import torch

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def generate(model: Any, tokens: torch.Tensor, num_new: int, **options: Any) -> Any:
    """Greedy, to the full length."""
    return model.generate(tokens, max_new_tokens=num_new, **GREEDY, **options)


def step(model: Any, cache: Any, token: int = 65) -> torch.Tensor:
    """Logits [batch_size, vocab_size] after one more token in each row."""
    with torch.no_grad():
        tokens = torch.full((cache.batch_size, 1), token)
        logits: torch.Tensor = model(tokens, past_key_values=cache).logits[:, -1]
    return logits


def rows_of(cache: Any, row: int = 0) -> list[torch.Tensor]:
    """Keys and values of every layer: [num_kv_heads, kv_len, head_dim]."""
    layers = range(cache.store.num_layers)
    return [rows for i in layers for rows in cache.store.gather(cache.seqs[row], i)]
