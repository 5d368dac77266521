"""A call that fails leaves the policy's state as it was: what follows is as if it had not been."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import small
from tiny_models import random_tokens

from offload import OffloadedModel

STATEFUL = ["lfps", "lychee_cluster", "quest"]
LONG = 220


@pytest.fixture(scope="module", params=[None, "inline"])
def backend(request):
    return request.param


@pytest.fixture(scope="module", params=STATEFUL)
def model(request, backend, tiny_folders: dict[str, Path]) -> Any:
    return OffloadedModel.from_pretrained(
        tiny_folders["llama"],
        policy=small(request.param),
        dtype="float32",
        num_threads=1,
        backend=backend,
        page_tokens=16,
    )


@contextmanager
def nan_in_layer(model: Any, layer_idx: int) -> Iterator[None]:
    """A norm that makes the queries, keys and values of one layer NaN."""
    weight = model.model.layers[layer_idx].input_layernorm.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        yield
    finally:
        weight.copy_(kept)


def steps(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of each of `tokens` [1, n], decoded one by one."""
    rows = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(tokens.shape[1])]
    return torch.cat(rows, dim=1)


def check_same_from_here(model: Any, cache: Any, unharmed: Any, num_tokens: int = 20) -> None:
    tokens = random_tokens(1, num_tokens, seed=9)
    assert cache.kv_lens == unharmed.kv_lens
    assert torch.equal(steps(model, cache, tokens), steps(model, unharmed, tokens))


def conversation(model: Any, prompt_tokens: int = LONG, num_steps: int = 13) -> tuple[Any, Any]:
    """A cache in the middle of decoding, and a copy of it."""
    cache = model.new_cache()
    model(random_tokens(1, prompt_tokens), past_key_values=cache)
    steps(model, cache, random_tokens(1, num_steps, seed=3))
    return cache, copy.deepcopy(cache)


@pytest.mark.parametrize("layer_idx", [0, 2])
def test_a_failed_follow_up_prefill(model, layer_idx):
    cache, unharmed = conversation(model)
    with nan_in_layer(model, layer_idx), pytest.raises((ValueError, RuntimeError), match="finite"):
        model(random_tokens(1, 40, seed=1), past_key_values=cache)
    check_same_from_here(model, cache, unharmed)


@pytest.mark.parametrize("prompt_tokens", [LONG, 40])
@pytest.mark.parametrize("layer_idx", [0, 1, 2])
def test_a_failed_decode_step(model, layer_idx, prompt_tokens):
    """Layers above the one that fails have learnt from it."""
    cache, unharmed = conversation(model, prompt_tokens)
    for seed in range(3):
        with nan_in_layer(model, layer_idx), pytest.raises(RuntimeError, match="finite"):
            model(random_tokens(1, 1, seed=seed), past_key_values=cache)
    check_same_from_here(model, cache, unharmed, 70 if prompt_tokens < LONG else 20)
