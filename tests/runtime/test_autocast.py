"""An enclosing `torch.autocast` changes nothing: the model computes in its own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.device_cases import GRAPH, INLINE, NATIVE, STREAM, greedy, load, small
from cases.tiny_models import random_tokens

from offload import OffloadedModel


@pytest.mark.parametrize("backend", [NATIVE, INLINE, STREAM, GRAPH])
def test_float32_model(tiny_folders: Any, backend: Any) -> None:
    check(load(tiny_folders["llama"], "full", backend), torch.bfloat16)


@pytest.mark.parametrize("backend", [STREAM])
def test_index_built_on_a_gpu(tiny_folders: Any, backend: Any) -> None:
    """By torch's matrix products."""
    check(load(tiny_folders["llama"], small("lychee_cluster"), backend), torch.bfloat16)


@pytest.mark.parametrize("backend", [NATIVE, INLINE, STREAM, GRAPH])
def test_bfloat16_model(tiny_folders: Any, backend: Any) -> None:
    device, name = backend
    model = OffloadedModel.from_pretrained(
        tiny_folders["qwen3"], dtype="bfloat16", device=device, backend=name, num_threads=1
    )
    check(model, torch.float16)


def check(model: Any, dtype: torch.dtype) -> None:
    """The same logits and tokens, of prompts, of one row and of several."""
    device = model.device.type
    prompt, rows = random_tokens(1, 80).to(device), random_tokens(3, 80).to(device)

    def run() -> list[torch.Tensor]:
        cache = model.new_cache()
        logits = [model(prompt, past_key_values=cache, labels=prompt)]
        logits.append(model(prompt[:, :1], past_key_values=cache))
        tokens = [greedy(model, prompt, 4), greedy(model, rows, 4)]
        tokens.append(greedy(model, prompt, 3, num_beams=2))
        return [*(x.logits for x in logits), logits[0].loss, *tokens]

    expected = run()
    with torch.autocast("cpu", dtype), torch.autocast(device, dtype):
        got = run()
        assert torch.is_autocast_enabled(device)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_first_steps_under_autocast(tiny_folders: Any) -> None:
    """Nothing that is made on the way is of another dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        model = load(tiny_folders["llama"], "full", ("cpu", "inline"))
        got = greedy(model, random_tokens(2, 30), 5)
    assert torch.equal(got, greedy(model, random_tokens(2, 30), 5))


@pytest.mark.parametrize("backend", [STREAM, GRAPH])
def test_graphs_captured_under_autocast(tiny_folders: Any, backend: Any) -> None:
    model = load(tiny_folders["llama"], "full", backend)
    tokens = random_tokens(3, 30)
    with torch.autocast("cuda", torch.float16):
        got = greedy(model, tokens, 8)
    assert torch.equal(got, greedy(load(tiny_folders["llama"], "full", backend), tokens, 8))
