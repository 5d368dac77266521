"""Lean decoder layers, and the families of models that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from offload.models.base import DecoderLayer, LayerSpec, LeanModel
from offload.models.families import ALWAYS_LEAN, FAMILIES
from offload.models.missing_features import MEDIA, NEVER_GENERIC, unsupported_type
from offload.models.model_family import ModelFamily, Where
from offload.models.shape import ModelShape

__all__ = [
    "ALWAYS_LEAN",
    "FAMILIES",
    "DecoderLayer",
    "LayerSpec",
    "LeanModel",
    "ModelFamily",
    "ModelShape",
    "Where",
    "family_of",
    "has_other_matrices",
    "is_generic",
    "lean_model_maker",
    "lean_text",
]


def is_generic(config: Mapping[str, Any], *, where: Where = "cpu") -> bool:
    """Whether a config.json is of a causal language model of text in transformers, maybe beside
    other models, for which there are no lean layers here, and whose own modules can be tried
    (`offload.runtime.generic_loading`).

    Args:
        where: what would compute its layers.
    """
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:
        return not _is_lean(FAMILIES[model_type], config, where)
    if model_type in NEVER_GENERIC or lean_text(config, where=where) is not None:
        return False
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        text = None
    if config.get("is_encoder_decoder") or (text is None and any(x in config for x in MEDIA)):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

    return model_type in TYPES or (text is not None and text.get("model_type") in TYPES)


def lean_text(config: Mapping[str, Any], *, where: Where = "cpu") -> dict[str, Any] | None:
    """The content that config.json of a multi-modal model's text part would have, if there are lean
    layers for all that it computes; None: there are not, or the model is no multi-modal one.

    Args:
        where: what would compute its layers.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type in FAMILIES or not isinstance(config.get("text_config"), Mapping):
        return None
    try:
        text = CONFIG_MAPPING[model_type].from_dict(dict(config)).get_text_config(decoder=True)
        if not FAMILIES[text.model_type].is_lean(text, where=where):
            return None
    except Exception:  # of any kind: without such a family, or whoever loads it says what is wrong
        return None
    of_both = ("quantization_config", "dtype", "torch_dtype")
    return text.to_dict() | {name: config[name] for name in of_both if name in config}


def family_of(config: Mapping[str, Any]) -> ModelFamily | None:
    """The family with lean layers of a config.json; None: it has none."""
    return FAMILIES.get(str(config.get("model_type")))


def has_other_matrices(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family with lean layers whose matrices `matrix_sizes` does not
    tell, such as experts: a skeleton of the stock model does."""
    family = family_of(config)
    return family is not None and family.has_other_matrices


def _is_lean(family: ModelFamily, config: Mapping[str, Any], where: Where) -> bool:
    from transformers import CONFIG_MAPPING

    if not family.may_be_generic:
        return True
    try:
        made = CONFIG_MAPPING[family.model_type].from_dict(dict(config))
    except Exception:  # of any kind: whoever loads it says what is wrong
        return True
    return family.is_lean(made, where=where)


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
        said = unsupported_type(model_type, named, sorted(FAMILIES))
        runs = "; generate() and `offload generate` run it without lean layers"
        raise ValueError(f"{said}{runs}" if is_generic(named) else said)
    return partial(FAMILIES[model_type].lean_model, heads_may_differ=heads_may_differ)
