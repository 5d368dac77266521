"""What a cache has, beside what a prefill of all of its tokens gives."""

from __future__ import annotations

from typing import Any

import torch


def read(model: Any, tokens: torch.Tensor, **options: Any) -> tuple[Any, torch.Tensor]:
    """A new cache with `tokens`, and the logits of the last."""
    cache = model.new_cache()
    return cache, model(tokens, past_key_values=cache, **options).logits[:, -1]


def rows_of(cache: Any) -> list[torch.Tensor]:
    return [x for keys, values, _ in cache for x in (keys, values)]


def largest_difference(cache: Any, other: Any) -> float:
    """Of keys and values, in any layer."""
    pairs = zip(rows_of(cache), rows_of(other), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def check_exact(cache: Any, exact: Any, tokens: torch.Tensor) -> None:
    """Keys and values of `tokens`, the first ones, are as of a prefill of them."""
    first = slice(tokens.shape[1])
    pairs = zip(rows_of(cache), rows_of(read(exact, tokens)[0]), strict=True)
    assert max(float((x[:, :, first] - y).abs().max()) for x, y in pairs) < 1e-4
