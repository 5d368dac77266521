"""`torch.inference_mode()` around some calls and not around others.

A tensor made in that mode could never be written outside of it, so none may outlive a call.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import FLAGS, NATIVE, greedy, load, small
from cases.tiny_models import random_tokens


def kept_inference_tensors() -> list[list[int]]:
    """Shapes of all that there are in the process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return [list(x.shape) for x in tensors if x.is_inference()]


@pytest.mark.parametrize("backend", [NATIVE, FLAGS])
@pytest.mark.parametrize("name", ["full", "lfps"])
def test_first_call(name: str, backend: Any, tiny_folders: dict[str, Path]) -> None:
    """A whole life under the mode, loading included; afterwards, all the same without it."""
    policy = "full" if name == "full" else small(name, 48)
    prompt = random_tokens(2, 70)
    with torch.inference_mode():
        model = load(tiny_folders["llama"], policy, backend, num_threads=1)
        cache = model.new_cache()
        model(prompt[:, :40], past_key_values=cache)  # queries are kept: nothing was selected yet
        copied = copy.deepcopy(cache)
        logits = [model(prompt[:, 40:], past_key_values=copied).logits]
        logits += [model(prompt[:, :1], past_key_values=copied).logits]
        expected = greedy(model, prompt, 4).tolist()
        again = copy.deepcopy(copied)
    assert not kept_inference_tensors()
    outside = model(prompt[:, 40:], past_key_values=cache).logits
    assert torch.equal(outside, logits[0])
    assert torch.equal(model(prompt[:, :1], past_key_values=cache).logits, logits[1])
    assert torch.equal(
        model(prompt[:, :1], past_key_values=copied).logits,
        model(prompt[:, :1], past_key_values=again).logits,
    )
    assert greedy(model, prompt, 4).tolist() == expected
    assert greedy(model, prompt, 4, do_sample=True, top_k=1).tolist() == expected


@pytest.mark.parametrize("backend", [NATIVE, FLAGS])
def test_beams_of_padded_prompts(backend: Any, tiny_folders: dict[str, Path]) -> None:
    """Rows that beams choose again are written outside of the mode."""
    model = load(tiny_folders["llama"], "full", backend, num_threads=1)
    prompt = random_tokens(2, 70)
    mask = torch.ones_like(prompt).index_fill_(1, torch.arange(5), 0)
    expected = greedy(model, prompt, 4, attention_mask=mask, num_beams=2).tolist()
    with torch.inference_mode():
        found = greedy(model, prompt, 4, attention_mask=mask, num_beams=2).tolist()
    assert found == expected
