"""The model types that have lean layers: what each computes that the others do not.

A new dense family is one line of `FAMILIES`, or a subclass where its stock modules have other names
or its layers differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.models.base import (
    DecoderLayer,
    LayerSpec,
    LeanModel,
    check_alike,
    check_computation,
    context_limit,
    fused_linear,
)
from offload.models.rope import rotary_view
from offload.models.shape import ModelShape


@dataclass(frozen=True)
class ModelFamily:
    """Llama-like models of one `config.model_type`, as transformers' `…ForCausalLM` has them.

    Attributes:
        has_qk_norm: query and key heads have an RMSNorm before the rotary embedding.
    """

    model_type: str
    has_qk_norm: bool = False

    def rotary_modules(self, stock: Any) -> tuple[Any, ...]:
        """The distinct rotary embeddings; `LayerSpec.rope_idx` counts them."""
        return (stock.model.rotary_emb,)

    def layer_spec(self, stock: Any, layer_idx: int) -> LayerSpec:
        """What attention of a layer is."""
        config, attention = stock.config, stock.model.layers[layer_idx].self_attn
        return LayerSpec(
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=int(attention.head_dim),
            sm_scale=float(attention.scaling),
            has_qk_norm=self.has_qk_norm,
        )

    def layer(self, stock: Any, layer_idx: int, spec: LayerSpec) -> DecoderLayer:
        """A layer's weights before and after its attention."""
        stock_layer, name = stock.model.layers[layer_idx], f"model.layers.{layer_idx}"
        attention, mlp = stock_layer.self_attn, stock_layer.mlp
        in_attention, in_mlp = f"{name}.self_attn.", f"{name}.mlp."
        return DecoderLayer(
            input_norm=stock_layer.input_layernorm,
            qkv=fused_linear(in_attention, attention, "q_proj", "k_proj", "v_proj"),
            q_norm=attention.q_norm if spec.has_qk_norm else None,
            k_norm=attention.k_norm if spec.has_qk_norm else None,
            o_proj=fused_linear(in_attention, attention, "o_proj"),
            mlp_norm=stock_layer.post_attention_layernorm,
            gate_up=fused_linear(in_mlp, mlp, "gate_proj", "up_proj"),
            down=fused_linear(in_mlp, mlp, "down_proj"),
            spec=spec,
        )

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        """The lean view of `stock`.

        Args:
            heads_may_differ: who calls takes layers that differ in their heads.

        Raises:
            NotImplementedError: if a projection is not a plain linear layer (quantised weights and
                adapters replace them), layers differ in their heads, or the model computes
                something that the lean layers do not.
        """
        config, model = stock.config, stock.model
        check_computation(config)
        specs = [self.layer_spec(stock, layer_idx) for layer_idx in range(len(model.layers))]
        if not heads_may_differ:
            check_alike(specs, "calibration, training, benchmarks or ranks")
        most = {
            key: max(getattr(spec, name) for spec in specs)
            for key, name in (
                ("num_attention_heads", "num_qo_heads"),
                ("num_key_value_heads", "num_kv_heads"),
                ("head_dim", "head_dim"),
            )
        }
        rotaries, ropes = self.rotary_modules(stock), {}
        for spec in specs:
            ropes[spec.rope_idx] = rotary_view(rotaries[spec.rope_idx], spec.head_dim)
        max_context, reason = context_limit(config)
        return LeanModel(
            embed_tokens=model.embed_tokens,
            layers=tuple(self.layer(stock, i, spec) for i, spec in enumerate(specs)),
            final_norm=model.norm,
            lm_head=fused_linear("", stock, "lm_head"),
            ropes=tuple(ropes[rope_idx] for rope_idx in range(len(rotaries))),
            shape=ModelShape.of_config(config.to_dict() | most, max_context),
            max_context_reason=reason,
        )


FAMILIES = {
    family.model_type: family
    for family in (
        ModelFamily("llama"),  # 1-3.x, SmolLM2 and others: optional biases, any rope scaling
        ModelFamily("mistral"),  # early versions attend through a window (see `context_limit`)
        ModelFamily("qwen2"),  # and Qwen2.5: biases on q, k and v
        ModelFamily("qwen3", has_qk_norm=True),  # the dense ones
    )
}
