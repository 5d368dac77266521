"""Qwen3 (dense): RMSNorm of each query and key head before the rotary embedding."""

from __future__ import annotations

from typing import Any

from offload.models.base import LeanModel, lean_model


def lean_qwen3(stock: Any) -> LeanModel:
    """Lean view of a `Qwen3ForCausalLM`."""
    return lean_model(stock, has_qk_norm=True)
