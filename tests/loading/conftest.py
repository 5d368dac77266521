"""GGUF files of tiny models, and a cache for what they are converted to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def written(tmp_path: Path, cache: Path) -> Callable[..., Path]:
    """A GGUF file of a stock model, the tiny llama by default."""

    def write(stock: Any = None, **options: Any) -> Path:
        path = tmp_path / "tiny.gguf"
        write_gguf(path, stock or make_tiny_model("llama"), byte_tokenizer(), **options)
        return path

    return write
