"""Tokenizers of a checkpoint's folder that are refused: code, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model

from offload import load_tokenizer
from offload.loading.gguf import CONVERTED_MARK


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer_config.json names Python code, and stdin would say yes to it."""
    (tmp_path / "custom.py").write_text(
        f"open({str(tmp_path / 'was_run')!r}, 'w').close()\nclass Custom: pass\n"
    )
    for name, extra in {
        "config.json": {"model_type": "llama", "auto_map": {"AutoConfig": "custom.Custom"}},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}},
    }.items():
        (tmp_path / name).write_text(json.dumps({"tokenizer_class": "Custom", **extra}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="auto_map names Python code of the checkpoint"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    message = f"{tmp_path} has no tokenizer: no tokenizer.json or vocab.json"
    for extra in ("config.json", "tokenizer_config.json", CONVERTED_MARK):
        if not (tmp_path / extra).exists():
            (tmp_path / extra).write_text("{}")
        with pytest.raises(FileNotFoundError, match=message):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_damaged_tokenizer(tmp_path: Path, name: str) -> None:
    """Not JSON, nested too deeply, or other JSON than a tokenizer's: the file, or the folder."""
    make_tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for damaged in ("{", "[" * 10**6, '{"a":' * 10**6):
        (tmp_path / name).write_text(damaged)
        with pytest.raises(ValueError, match=f"{tmp_path / name} is not valid JSON"):
            load_tokenizer(tmp_path)
    (tmp_path / name).write_text('{"a": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_tokenizer(tmp_path)
