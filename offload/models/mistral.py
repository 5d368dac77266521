"""Mistral: no biases; early versions attend through a sliding window (see `context_limit`)."""

from __future__ import annotations

from typing import Any

from offload.models.base import LeanModel, lean_model


def lean_mistral(stock: Any) -> LeanModel:
    """Lean view of a `MistralForCausalLM`."""
    return lean_model(stock, has_qk_norm=False)
