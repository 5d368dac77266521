"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from offload.models.base import LeanModel, lean_model


def lean_qwen2(stock: Any) -> LeanModel:
    """Lean view of a `Qwen2ForCausalLM`."""
    return lean_model(stock, has_qk_norm=False)
