"""What tests/compatibility, which runs every mode of generate(), does not look at."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from cases.tiny_models import random_tokens
from transformers import pipeline

from offload.prefill import forward

Pair = tuple[Any, Any]


def both(pair: Pair, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """generate() of the stock and the offloaded model, from the same random state."""
    outputs = []
    for model in pair:
        torch.manual_seed(7)
        outputs.append(model.generate(*args, **kwargs))
    return outputs[0], outputs[1]


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    width = max(lengths)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": random_tokens(len(lengths), width), "attention_mask": mask}


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 40},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "length_penalty": 0.5},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "prefill_chunk_size": 16},
        {"do_sample": False, "cache_implementation": "dynamic"},
    ],
    ids=lambda mode: "-".join(mode),
)
def test_a_row_without_a_prompt(llama_pair: Pair, mode: dict[str, Any]) -> None:
    expected, got = both(llama_pair, **left_padded(40, 0, 9), **mode, max_new_tokens=30)
    assert torch.equal(got, expected)


def test_pipeline_finds_the_tokenizer(llama_pair: Pair, tokenizer: Any) -> None:
    model = llama_pair[1]
    generate = pipeline("text-generation", model=model, tokenizer=model.name_or_path)
    got = generate("Hello there", max_new_tokens=5, do_sample=False)
    generate = pipeline("text-generation", model=llama_pair[0], tokenizer=tokenizer)
    assert got == generate("Hello there", max_new_tokens=5, do_sample=False)


def test_beams_share_the_prompt(offloaded_models: dict[str, Any]) -> None:
    """4 beams of a long prompt take the pages of one prompt and their own last pages."""
    model = offloaded_models["llama"]
    model.generate(random_tokens(1, 320), num_beams=4, max_new_tokens=20, do_sample=False)
    most_pages = model.offload_stats().kv_host_bytes / model.kv_store.page_bytes / 3
    assert 320 / 16 < most_pages <= 320 / 16 + 4 * 3


def test_statistics(llama_pair: Pair) -> None:
    model = llama_pair[1]
    model.generate(random_tokens(1, 30), max_new_tokens=10, do_sample=False, min_new_tokens=10)
    stats = model.offload_stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (30, 9)
    assert stats.prefill_tokens_per_second > 0
    assert stats.decode_tokens_per_second > 0
    assert stats.kv_host_bytes == 3 * 3 * model.kv_store.page_bytes  # 39 tokens, 3 layers
    assert stats.kv_device_bytes == 0


def test_torch_keeps_its_threads(offloaded_models: dict[str, Any]) -> None:
    """One thread between the passes, the configured number in prefill, and then as before."""
    seen = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) == 5:
            raise RuntimeError("enough")
        return scores

    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="enough"):
            offloaded_models["llama"].generate(
                random_tokens(1, 9), max_new_tokens=9, logits_processor=[note]
            )
        assert seen == [1] * 5
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("is_ours", "few", "is_int8", "expected"),
    [(True, 2, False, 1), (False, 2, False, 2), (True, 1, False, 2), (True, 2, True, 2)],
)
def test_torch_has_one_thread_beside_ours(
    is_ours: bool,
    few: int,
    is_int8: bool,
    expected: int,
    offloaded_models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a prompt whose products and attention are our pool's few threads'; int8 rows are not."""
    seen, add_mlp, model = set[int](), forward.add_mlp, offloaded_models["qwen3"]

    def note(*arguments: Any) -> None:
        seen.add(torch.get_num_threads())
        add_mlp(*arguments)

    monkeypatch.setattr(forward, "add_mlp", note)
    monkeypatch.setattr(forward, "has_products", lambda dtype: True)
    monkeypatch.setattr(forward, "_FEW_THREADS", few)
    monkeypatch.setattr(forward, "has_causal_attention", lambda dtype, head_dim: is_ours)
    if is_int8:
        options = {"kv_dtype": "int8", "num_threads": 2}
        model = type(model).from_pretrained(model.config._name_or_path, **options)
    model(random_tokens(1, 30))
    assert seen == {expected}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_of_torch_do_not_spin_long(given: dict[str, str], expected: str) -> None:
    """Unless somebody has said how long."""
    of_openmp = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: x for name, x in os.environ.items() if name not in of_openmp} | given
    program = "import os, sys, offload; assert 'torch' not in sys.modules; "
    program += "print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == expected
