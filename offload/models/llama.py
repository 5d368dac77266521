"""Llama 1-3.x, SmolLM2 and others of model type "llama": optional biases, any rope scaling."""

from __future__ import annotations

from typing import Any

from offload.models.base import LeanModel, lean_model


def lean_llama(stock: Any) -> LeanModel:
    """Lean view of a `LlamaForCausalLM`."""
    return lean_model(stock, has_qk_norm=False)
