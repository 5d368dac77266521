"""Lean decoder layers, and the families of models that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from offload.models.base import DecoderLayer, LayerSpec, LeanModel
from offload.models.families import FAMILIES, ModelFamily
from offload.models.missing_features import unsupported_type
from offload.models.shape import ModelShape

__all__ = [
    "DecoderLayer",
    "LayerSpec",
    "LeanModel",
    "ModelFamily",
    "ModelShape",
    "lean_model_maker",
]


def lean_model_maker(
    model_type: str,
    config: Mapping[str, Any] | None = None,
    *,
    heads_may_differ: bool = False,
) -> Callable[[Any], LeanModel]:
    """The function that makes the lean view of a stock model of `model_type`.

    Args:
        config: the content of its config.json, which may tell what it has that is missing here.
        heads_may_differ: as of `ModelFamily.lean_model`.

    Raises:
        ValueError: for a model type without lean layers: what is missing, and those that have them.
    """
    if model_type not in FAMILIES:
        named = {"model_type": model_type, **(config or {})}
        raise ValueError(unsupported_type(model_type, named, sorted(FAMILIES)))
    return partial(FAMILIES[model_type].lean_model, heads_may_differ=heads_may_differ)
