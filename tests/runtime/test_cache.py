"""OffloadedCache, beyond test_cache_properties.py: what is refused, and when memory comes back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from cases.tiny_models import random_tokens
from transformers import DynamicCache

Pair = tuple[Any, Any]


def next_logits(model: Any, cache: Any, batch_size: int, mask: torch.Tensor | None = None) -> Any:
    """Logits after one more token, the same for all rows; says what the cache holds."""
    token = torch.full((batch_size, 1), 65)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=1)
    with torch.no_grad():
        return model(token, attention_mask=mask, past_key_values=cache).logits


def test_crop_of_padded_rows(llama_pair: Pair) -> None:
    """Columns are cropped, padding among them."""
    stock, offloaded = llama_pair
    tokens, mask = random_tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :9], mask[1, 14:] = 0, 0
    logits = []
    for model, cache in ((stock, DynamicCache()), (offloaded, offloaded.new_cache())):
        with torch.no_grad():
            model(tokens, attention_mask=mask, past_key_values=cache)
        cache.crop(-4)
        logits.append(next_logits(model, cache, 2, mask[:, :16]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert cache.kv_lens == [8, 15]


def test_crop_refuses_a_length(llama_pair: Pair) -> None:
    with pytest.raises(ValueError, match="0 or less, got 5"):
        llama_pair[1].new_cache().crop(5)


@pytest.mark.parametrize(
    ("operation", "error", "message"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0, 3])), IndexError, "row 3 .* 3 rows"),
        (lambda cache: cache.batch_select_indices(torch.tensor([-4])), IndexError, "row -4 of"),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([True, False])),
            IndexError,
            "mask of 2 rows, but the cache has 3",
        ),
        (lambda cache: cache.batch_repeat_interleave(-1), ValueError, "negative, got -1"),
    ],
)
def test_rows_that_do_not_exist(
    llama_pair: Pair, operation: Any, error: type[Exception], message: str
) -> None:
    model = llama_pair[1]
    cache = model.new_cache()
    model(random_tokens(3, 20), past_key_values=cache)
    with pytest.raises(error, match=message):
        operation(cache)
    assert cache.kv_lens == [20, 20, 20]


@pytest.mark.parametrize(
    "operation",
    [
        lambda cache: cache.crop(-20),
        lambda cache: cache.batch_repeat_interleave(0),
        lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.int64)),
        lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
    ],
)
def test_nothing_left_is_a_new_cache(llama_pair: Pair, operation: Any) -> None:
    stock, model = llama_pair
    cache, tokens = model.new_cache(), random_tokens(3, 12)
    cache.reorder_cache(torch.tensor([1, 0]))  # no rows yet: stock caches take that, too
    model(random_tokens(2, 20), past_key_values=cache)
    operation(cache)
    assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
    assert model.kv_store.host_bytes_used == 0
    with torch.no_grad():
        expected = stock(tokens).logits
    logits = model(tokens, past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_crop_gives_pages_back(llama_pair: Pair) -> None:
    model = llama_pair[1]
    cache = model.new_cache()
    model(random_tokens(1, 100), past_key_values=cache)
    used = model.kv_store.host_bytes_used
    cache.crop(-84)
    assert model.kv_store.host_bytes_used == used // 7
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    assert model.kv_store.host_bytes_used == 0


def test_memory_comes_back(llama_pair: Pair) -> None:
    model = llama_pair[1]
    cache = model.new_cache()
    model(random_tokens(2, 30), past_key_values=cache)
    assert model.kv_store.num_sequences == 2
    cache.reset()
    assert model.kv_store.num_sequences == 0
    assert cache.get_seq_length() == 0
    model(random_tokens(3, 30), past_key_values=cache)
    assert cache.kv_lens == [30, 30, 30]
    cache.loop = cache  # only the garbage collector can end this one
    del cache
    gc.collect()
    assert model.kv_store.num_sequences == 0


def test_what_transformers_asks(llama_pair: Pair) -> None:
    model = llama_pair[1]
    cache = model.new_cache()
    assert (cache.batch_size, cache.is_initialized, cache.get_seq_length()) == (-1, False, 0)
    model(random_tokens(2, 30), past_key_values=cache)
    assert (cache.batch_size, cache.is_initialized, len(cache)) == (2, True, 3)
    assert cache.get_mask_sizes(5, 0) == (35, 0)
    assert cache.get_max_length() == -1
    assert cache.is_croppable
    assert not cache.is_compileable
    assert repr(cache) == "OffloadedCache(kv_lens=[30, 30])"
    with pytest.raises(NotImplementedError, match="OffloadedModel only"):
        llama_pair[0](random_tokens(2, 1), past_key_values=cache)


@pytest.mark.parametrize("padded", [False, True])
def test_layers_can_be_read(llama_pair: Pair, padded: bool) -> None:
    """As those of a stock cache, but for padding, of which nothing is kept."""
    stock, offloaded = llama_pair
    tokens, mask = random_tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    if padded:
        mask[1, :5] = 0
    caches = DynamicCache(), offloaded.new_cache()
    assert [layer.keys for layer in caches[1].layers] == [None] * 3
    with torch.no_grad():
        for model, cache in zip(llama_pair, caches, strict=True):
            model(tokens, attention_mask=mask, past_key_values=cache)
    assert len(caches[1].layers) == len(list(caches[1])) == stock.config.num_hidden_layers
    for ours, theirs in zip(caches[1], caches[0], strict=True):
        for side in range(2):
            expected = theirs[side] * mask[:, None, :, None]
            torch.testing.assert_close(ours[side], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(caches[1].layers[2].values, ours[1])
    caches[1].activate_past_recording()
    assert caches[1].is_sliding == [False] * 3
    assert [layer.get_seq_length() for layer in caches[1].layers] == [21] * 3


@pytest.mark.parametrize("seq_len", [1, 3])
def test_a_row_without_a_new_token(llama_pair: Pair, seq_len: int) -> None:
    """It stays as it is, and goes on later."""
    _, model = llama_pair
    tokens, mask = random_tokens(3, 20), torch.ones(3, 20 + seq_len, dtype=torch.long)
    mask[1, 20:] = 0
    cache = model.new_cache()
    model(tokens, past_key_values=cache)
    new = random_tokens(3, seq_len, seed=1)
    logits = model(new, attention_mask=mask, past_key_values=cache).logits
    assert cache.kv_lens == [20 + seq_len, 20, 20 + seq_len]
    assert not logits[1].any()
    for row in (0, 2):
        alone = model.new_cache()
        model(tokens[[row]], past_key_values=alone)
        expected = model(new[[row]], past_key_values=alone).logits
        torch.testing.assert_close(logits[[row]], expected, rtol=1e-4, atol=1e-4)
    mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
    positions = torch.tensor([[20 + seq_len], [20], [20 + seq_len]])
    later = model(
        torch.full((3, 1), 65), attention_mask=mask, position_ids=positions, past_key_values=cache
    ).logits
    alone = model.new_cache()
    model(tokens[[1]], past_key_values=alone)
    expected = next_logits(model, alone, 1)
    torch.testing.assert_close(later[[1]], expected, rtol=1e-4, atol=1e-4)


def test_no_new_token_at_all(llama_pair: Pair) -> None:
    cache, mask = llama_pair[1].new_cache(), torch.ones(2, 5, dtype=torch.long)
    llama_pair[1](random_tokens(2, 4), past_key_values=cache)
    mask[:, 4] = 0
    with pytest.raises(ValueError, match=r"hides all of the new tokens \[2, 1\]"):
        llama_pair[1](random_tokens(2, 1), attention_mask=mask, past_key_values=cache)
    assert cache.kv_lens == [4, 4]
