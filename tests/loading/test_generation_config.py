"""What a checkpoint's files ask of every generation, and an offloaded model does not do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens
from transformers import GenerationConfig

from offload import OffloadedModel

STATIC = "cache_implementation='static': the KV cache of an offloaded model is its host store"


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("has_own_file", [True, False])
@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"use_cache": False}, "use_cache=False (now True)"),
        ({"cache_implementation": "static"}, "cache_implementation='static' (now None)"),
        ({"output_hidden_states": True}, "output_hidden_states=True (now False)"),
        ({"output_attentions": True}, "output_attentions=True (now False)"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2 (now None)"),
        ({"use_mtp": True}, "use_mtp=True (now None)"),
        ({"use_cache": True, "cache_implementation": "dynamic"}, None),
    ],
)
def test_files_are_overridden_with_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    warned: str | None,
    has_own_file: bool,
) -> None:
    """The prompt is read once, the policy runs, and the tokens are those of a model without."""
    make_tiny_model("llama").save_pretrained(tmp_path)
    own = tmp_path / "generation_config.json"
    if not has_own_file:
        own.unlink()
    changed = own if has_own_file else tmp_path / "config.json"
    tokens = random_tokens(1, 100)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}

    def load() -> Any:
        return OffloadedModel.from_pretrained(tmp_path, "exact_topk", num_threads=1)

    expected = load().generate(tokens, **options)
    change(changed, **settings)
    with caplog.at_level(logging.WARNING, "offload"):
        model, _ = load(), load()
    said = [x.getMessage() for x in caplog.records if x.name.startswith("offload")]
    asks = f"{changed} asks for what an offloaded model does not do: {warned}"
    assert said == ([] if warned is None else [asks])
    output = model.generate(tokens, **options)
    # As of stock, it is a dict if config.json asks for more than the tokens.
    assert torch.equal(getattr(output, "sequences", output), expected)
    stats = model.offload_stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (100, 7)


def test_what_the_caller_asks_for_is_not_overridden(tmp_path: Path) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    change(tmp_path / "generation_config.json", cache_implementation="static")
    model, tokens = OffloadedModel.from_pretrained(tmp_path, num_threads=1), random_tokens(1, 20)
    options = {"max_new_tokens": 4, "eos_token_id": None}
    with pytest.raises(ValueError, match=STATIC):
        model.generate(tokens, **options, cache_implementation="static")
    with pytest.raises(ValueError, match=STATIC):
        model.generate(tokens, GenerationConfig(cache_implementation="static", **options))
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        model.generate(tokens, **options, output_attentions=True)
    model.generate(tokens, **options, use_cache=False)
    assert model.offload_stats().prefill_tokens == 20 + 21 + 22 + 23


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_return_sequences": 2}, "greedy"), ({"pad_token_id": "x"}, "str"), ("{", "JSON")],
)
def test_a_file_that_transformers_refuses_is_named(
    tmp_path: Path, settings: dict[str, Any] | str, message: str
) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    if isinstance(settings, str):
        path.write_text(settings)
    else:
        change(path, **settings)
    with pytest.raises(ValueError, match=f"(?i)generation_config.json: .*{message}"):
        OffloadedModel.from_pretrained(tmp_path, num_threads=1)
