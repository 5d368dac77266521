"""What a cache has, beside what a prefill of all of its tokens gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def read(model: Any, tokens: torch.Tensor, **options: Any) -> tuple[Any, torch.Tensor]:
    """A new cache with `tokens`, and the logits of the last."""
    cache = model.new_cache()
    return cache, model(tokens, past_key_values=cache, **options).logits[:, -1]


def rows_of(cache: Any) -> list[torch.Tensor]:
    return [x for keys, values, _ in cache for x in (keys, values)]


def largest_difference(cache: Any, other: Any) -> float:
    """The largest difference between keys or values of two caches, in any layer."""
    pairs = zip(rows_of(cache), rows_of(other), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def padded(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [1, n] as one batch, padded on the left, and its mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return tokens, mask


def check_exact(cache: Any, exact: Any, tokens: torch.Tensor) -> None:
    """Keys and values of `tokens`, the first ones, are as of a prefill of them."""
    first = slice(tokens.shape[1])
    pairs = zip(rows_of(cache), rows_of(read(exact, tokens)[0]), strict=True)
    assert max(float((x[:, :, first] - y).abs().max()) for x, y in pairs) < 1e-4
