"""Lean decoder layers, and the table of the model types that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from offload.models.base import DecoderLayer, LeanModel, lean_model
from offload.models.missing_features import unsupported_type
from offload.models.shape import ModelShape

__all__ = ["DecoderLayer", "LeanModel", "ModelShape", "lean_model_maker"]

# By `config.model_type`: whether query and key heads have an RMSNorm before the rotary embedding.
_HAS_QK_NORM = {
    "llama": False,  # 1-3.x, SmolLM2 and others: optional biases, any rope scaling
    "mistral": False,  # early versions attend through a sliding window (see `context_limit`)
    "qwen2": False,  # and Qwen2.5: biases on q, k and v
    "qwen3": True,  # the dense ones
}


def lean_model_maker(
    model_type: str, config: Mapping[str, Any] | None = None
) -> Callable[[Any], LeanModel]:
    """The function that makes the lean view of a stock model of `model_type`.

    Args:
        config: the content of its config.json, which may tell what it has that is missing here.

    Raises:
        ValueError: for a model type without lean layers: what is missing, and those that have them.
    """
    if model_type not in _HAS_QK_NORM:
        named = {"model_type": model_type, **(config or {})}
        raise ValueError(unsupported_type(model_type, named, sorted(_HAS_QK_NORM)))
    return partial(lean_model, has_qk_norm=_HAS_QK_NORM[model_type])
