"""A tiny model with room for RULER's prompts in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model


@pytest.fixture(scope="session")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,048 positions, float32, and no chat template."""
    folder = tmp_path_factory.mktemp("roomy")
    make_tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
