"""Every model type against transformers: logits, greedy tokens, loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.slowly import combinations
from cases.tiny_models import random_tokens

Pair = tuple[Any, Any]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("use_cache", "num_tokens"), combinations([True, False], [1, 23, 24, 25, 101])
)
def test_prefill_logits(model_pair: Pair, num_tokens: int, use_cache: bool) -> None:
    stock, offloaded = model_pair
    tokens = random_tokens(2, num_tokens)
    with torch.no_grad():
        expected = stock(tokens).logits
    assert_close(offloaded(tokens, use_cache=use_cache).logits, expected)


def test_logits_with_a_past(model_pair: Pair) -> None:
    """Prefill after prefill, several tokens at once, one at a time: always the same logits."""
    stock, offloaded = model_pair
    tokens = random_tokens(2, 90)
    with torch.no_grad():
        expected = stock(tokens).logits
    cache = offloaded.new_cache()
    got = []
    for num_new in (30, 20, 1, 5, 16, 17, 1):
        start = cache.get_seq_length()
        out = offloaded(tokens[:, start : start + num_new], past_key_values=cache)
        assert out.past_key_values is cache
        got.append(out.logits)
    assert_close(torch.cat(got, dim=1), expected)


@pytest.mark.parametrize("padding", ["left", "right", "both"])
def test_padded_batch_logits(model_pair: Pair, padding: str) -> None:
    stock, offloaded = model_pair
    tokens = random_tokens(3, 50)
    mask = torch.ones(3, 50, dtype=torch.int64)
    if padding in ("left", "both"):
        mask[0, :13] = 0
        mask[1, :40] = 0
    if padding in ("right", "both"):
        mask[0, 45:] = 0
        mask[2, 20:] = 0
    with torch.no_grad():
        expected = stock(tokens, attention_mask=mask).logits
    got = offloaded(tokens, attention_mask=mask).logits
    assert_close(got[mask == 1], expected[mask == 1])


@pytest.mark.parametrize("keep", [1, 5, torch.tensor([0, 7, 29]), torch.tensor([[1, 2], [3, 4]])])
def test_logits_to_keep(model_pair: Pair, keep: int | torch.Tensor) -> None:
    stock, offloaded = model_pair
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        expected = stock(tokens, logits_to_keep=keep).logits
    assert_close(offloaded(tokens, logits_to_keep=keep).logits, expected)


def test_equal_rows_share_their_pages(offloaded_models: dict[str, Any]) -> None:
    offloaded = offloaded_models["llama"]
    row, other = random_tokens(1, 64), random_tokens(1, 64, seed=1)
    cache, rows = offloaded.new_cache(), torch.cat([row, other, row])
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 1}
    tokens = offloaded.generate(rows, past_key_values=cache, **options)
    assert tokens[0, -1] == tokens[2, -1]
    assert cache.kv_lens == [64, 64, 64]
    pages_of_two = 2 * 4 * 3  # rows * pages * layers
    assert offloaded.kv_store.host_bytes_used == pages_of_two * offloaded.kv_store.page_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_close(
    stock_models: dict[str, Any], tiny_folders: dict[str, Any], dtype: str
) -> None:
    from offload import OffloadedModel

    offloaded = OffloadedModel.from_pretrained(tiny_folders["qwen3"], dtype=dtype, num_threads=2)
    assert offloaded.dtype == getattr(torch, dtype)
    tokens = random_tokens(1, 40)
    with torch.no_grad():
        expected = stock_models["qwen3"](tokens).logits
    cache = offloaded.new_cache()
    got = [offloaded(tokens[:, :35], past_key_values=cache).logits]
    got += [offloaded(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(35, 40)]
    error = (torch.cat(got, dim=1).float() - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)
