"""transformers as it comes: KV with the model, or offloaded from a GPU to the host by layers.

The cache is filled with random keys and values: nothing here looks at them but dense attention,
and a prefill of 128K tokens would cost a minute of the lent machine.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Cache, DynamicCache

from offload.models.rope import head_dim_of

WARM_UP_STEPS = 2


def filled_cache(
    stock: Any, *, kv_len: int, batch_size: int = 1, offloaded: bool = False
) -> DynamicCache:
    """A cache of `kv_len` random tokens in every layer."""
    cache = DynamicCache(config=stock.config, offloading=offloaded)
    fill(cache, stock, kv_len=kv_len, batch_size=batch_size)
    return cache


def fill(cache: Cache, stock: Any, *, kv_len: int, batch_size: int) -> None:
    """Put `kv_len` random tokens into every layer of an empty cache."""
    config = stock.config
    shape = (batch_size, config.num_key_value_heads, kv_len, head_dim_of(config))
    generator = torch.Generator(stock.device).manual_seed(0)
    for layer_idx in range(config.num_hidden_layers):
        keys, values = (
            torch.empty(shape, dtype=stock.dtype, device=stock.device).normal_(generator=generator)
            for _ in range(2)
        )
        cache.update(keys, values, layer_idx)
        del keys, values


def cache_bytes(stock: Any, *, kv_len: int, batch_size: int = 1) -> int:
    """Bytes of the cache that `filled_cache` makes."""
    config = stock.config
    row = config.num_key_value_heads * head_dim_of(config) * stock.dtype.itemsize
    return int(2 * config.num_hidden_layers * batch_size * kv_len * row)


@torch.inference_mode()
def decode_seconds(stock: Any, cache: DynamicCache, *, num_steps: int) -> list[float]:
    """Seconds of each greedy decode step after `cache`, from one token on the host to the next.

    The first `WARM_UP_STEPS` are left out.
    """
    kv_len = cache.get_seq_length()
    first: Any = cache.layers[0]
    tokens = torch.zeros(first.keys.shape[0], 1, dtype=torch.int64, device=stock.device)
    seconds = []
    for position in range(kv_len, kv_len + WARM_UP_STEPS + num_steps):
        start = time.perf_counter()
        logits = stock(
            input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
            position_ids=torch.full_like(tokens, position),
            logits_to_keep=1,
        ).logits
        tokens = logits[:, -1:].argmax(-1)
        tokens.cpu()  # the token is needed to go on, and to be shown
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP_STEPS:]


@torch.inference_mode()
def prefill_seconds(stock: Any, *, num_tokens: int) -> float:
    """Seconds that transformers needs to read a prompt into a cache on the GPU."""
    generator = torch.Generator(stock.device).manual_seed(0)
    tokens = torch.randint(
        stock.config.vocab_size, (1, num_tokens), generator=generator, device=stock.device
    )
    cache = DynamicCache(config=stock.config)
    start = time.perf_counter()
    logits = stock(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    logits.argmax(-1).cpu()
    return time.perf_counter() - start
