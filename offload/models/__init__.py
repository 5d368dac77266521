"""Lean decoder layers, one file per model type, and the table that finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.models.base import DecoderLayer, LeanModel
from offload.models.llama import lean_llama
from offload.models.mistral import lean_mistral
from offload.models.qwen2 import lean_qwen2
from offload.models.qwen3 import lean_qwen3
from offload.models.shape import ModelShape

__all__ = ["DecoderLayer", "LeanModel", "ModelShape", "available_models", "lean_model_maker"]

_MAKERS: dict[str, Callable[[Any], LeanModel]] = {
    "llama": lean_llama,
    "mistral": lean_mistral,
    "qwen2": lean_qwen2,
    "qwen3": lean_qwen3,
}


def available_models() -> list[str]:
    """Model types (`config.model_type`) that have lean layers."""
    return sorted(_MAKERS)


def lean_model_maker(model_type: str) -> Callable[[Any], LeanModel]:
    """The function that makes the lean view of a stock model of `model_type`.

    Raises:
        ValueError: for a model type without lean layers, naming those that have them.
    """
    if model_type not in _MAKERS:
        available = ", ".join(available_models())
        raise ValueError(f"unsupported model type {model_type!r}; available: {available}")
    return _MAKERS[model_type]
