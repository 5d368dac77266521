"""Gemma's lean layers: norms around attention and the MLP, and windows in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.models.base import (
    DecoderLayer,
    LayerSpec,
    LeanModel,
    OnePlusNorm,
    ScaledNorm,
    UnitNorm,
)
from offload.models.model_family import RopesByType, Where


class Gemma3(RopesByType):
    """Norms times 1 + weight around attention and MLP, whose gate is a GELU."""

    packs_as_generic = True
    peculiar = "its norms come before and after attention and the MLP"

    def is_lean(self, config: Any, *, where: Where) -> bool:
        if config.use_bidirectional_attention not in (None, False, "vision"):  # of images
            return False
        return super().is_lean(config, where=where)

    def norm(self, stock: Any) -> ScaledNorm:
        """The view of an RMSNorm."""
        return OnePlusNorm(stock)

    def layer(self, stock: Any, layer_idx: int, spec: LayerSpec) -> DecoderLayer:
        stock_layer = stock.model.layers[layer_idx]
        norms: dict[str, Any] = {
            "input_norm": stock_layer.input_layernorm,
            "attention_out_norm": stock_layer.post_attention_layernorm,
            "mlp_norm": stock_layer.pre_feedforward_layernorm,
            "mlp_out_norm": stock_layer.post_feedforward_layernorm,
            "q_norm": stock_layer.self_attn.q_norm,
            "k_norm": stock_layer.self_attn.k_norm,
        }
        made: dict[str, Any] = {name: self.norm(norm) for name, norm in norms.items()}
        return replace(super().layer(stock, layer_idx, spec), gate="gelu_tanh", **made)

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        lean = super().lean_model(stock, heads_may_differ=heads_may_differ)
        return replace(lean, final_norm=self.norm(lean.final_norm))


class Gemma4(Gemma3):
    """Layers that see all tokens have heads of their own, whose values may be their keys without
    weight and rotation; values have a norm, too, and what a layer returns has a multiplier.

    Inputs of each layer, keys and values of other layers and experts are not computed.
    """

    has_other_matrices = True
    on_gpu = False  # its step has heads that are alike
    ropes = Gemma3.ropes | {"proportional"}

    def is_lean(self, config: Any, *, where: Where) -> bool:
        others = (
            config.hidden_size_per_layer_input,
            config.num_kv_shared_layers,
            config.enable_moe_block,
        )
        return not any(others) and super().is_lean(config, where=where)

    def projections(self, attention: Any) -> tuple[str, ...]:
        return "q_proj", "k_proj", "k_proj" if attention.v_proj is None else "v_proj"

    def norm(self, stock: Any) -> ScaledNorm:
        return ScaledNorm(stock, stock.eps)

    def layer(self, stock: Any, layer_idx: int, spec: LayerSpec) -> DecoderLayer:
        stock_layer = stock.model.layers[layer_idx]
        v_norm: Any = UnitNorm(stock_layer.self_attn.v_norm, spec.head_dim, stock.dtype)
        return replace(
            super().layer(stock, layer_idx, spec),
            v_norm=v_norm,
            out_scale=float(stock_layer.layer_scalar),
        )

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        lean = super().lean_model(stock, heads_may_differ=heads_may_differ)
        return replace(lean, logit_cap=stock.config.final_logit_softcapping or 0.0)
