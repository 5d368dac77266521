"""The model types that have lean layers: what each computes that the others do not.

A new family is one line of `FAMILIES`, or a subclass where its stock modules have other names
or its layers differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cpu_ops.routed_linear import ExpertChoice
from offload.models.base import (
    DecoderLayer,
    LayerSpec,
    LeanModel,
    RoundedNorm,
    ScaledEmbedding,
    ScaledNorm,
)
from offload.models.gemma import Gemma3, Gemma4
from offload.models.model_family import ModelFamily, RopesByType, Where
from offload.models.packed_experts import native_gate
from offload.models.rope import QueryScale, RotaryOfHalves
from offload.models.routed_mlp import RoutedMlp


class SomeLayersRotate(ModelFamily):
    """Layers without positions among others."""

    def rotates(self, attention: Any) -> bool:
        return bool(attention.use_rope)


class SlidingLayersRotate(ModelFamily):
    """Where a model has a window, as wide as the context or of no layer, layers without it do not
    rotate."""

    def rotates(self, attention: Any) -> bool:
        return attention.sliding_window is None or bool(attention.is_sliding)


@dataclass(frozen=True)
class Routed(ModelFamily):
    """Experts in the place of an MLP, in all layers or some.

    Attributes:
        rounds_weights: the router's weights are rounded to the model's dtype.
    """

    rounds_weights: bool = False

    packs_as_generic = has_other_matrices = True
    peculiar = "its MLPs have experts"

    def mlp(self, stock: Any, name: str) -> dict[str, Any]:
        module, config = stock.get_submodule(name.removesuffix(".")), stock.config
        if not hasattr(module, "experts"):
            return super().mlp(stock, name)
        gate = native_gate(module.experts)
        if gate is None:
            raise NotImplementedError(f"{name}experts have a gate that no kernel computes")
        choice = ExpertChoice(
            per_token=config.num_experts_per_tok,
            normalises=getattr(config, "norm_topk_prob", True),
            rounds=self.rounds_weights,
        )
        return {
            "gate_up": None,
            "down": None,
            "routed": RoutedMlp(module, choice, gate),
        }


class GptOss(Routed):
    """Experts whose gates are clamped, and attention with sinks, in some layers through windows."""

    knows_windows = True
    packs_dense = False  # experts are transposed
    peculiar = "its attention has sinks, and its MLPs experts"

    def layer(self, stock: Any, layer_idx: int, spec: LayerSpec) -> DecoderLayer:
        layer = super().layer(stock, layer_idx, spec)
        norms: dict[str, Any] = {
            name: RoundedNorm(norm, stock.dtype)
            for name in ("input_norm", "mlp_norm")
            if (norm := getattr(layer, name)).weight.dtype != stock.dtype  # of float16
        }
        sinks = stock.model.layers[layer_idx].self_attn.sinks.detach().float()
        return replace(layer, sinks=sinks, **norms)

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        lean = super().lean_model(stock, heads_may_differ=heads_may_differ)
        norm: Any = lean.final_norm
        if norm.weight.dtype != stock.dtype:
            norm = RoundedNorm(norm, stock.dtype)
        return replace(lean, final_norm=norm, ropes=tuple(map(RotaryOfHalves, lean.ropes)))


class Granite(ModelFamily):
    """Embeddings, scores, sums and logits have multipliers.

    The residual stream is kept divided by that of sums, r: then nothing multiplies these. A norm's
    output is the same with eps / r^2.
    """

    def layer(self, stock: Any, layer_idx: int, spec: LayerSpec) -> DecoderLayer:
        layer, scale = super().layer(stock, layer_idx, spec), stock.config.residual_multiplier
        norms: dict[str, Any] = {
            name: ScaledNorm(norm, norm.variance_epsilon / scale**2)
            for name in ("input_norm", "mlp_norm")
            if (norm := getattr(layer, name))
        }
        return replace(layer, **norms)

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        lean = super().lean_model(stock, heads_may_differ=heads_may_differ)
        config, norm = stock.config, lean.final_norm
        scale = config.embedding_multiplier / config.residual_multiplier
        eps = norm.variance_epsilon / config.residual_multiplier**2
        return replace(
            lean,
            embed_tokens=ScaledEmbedding(lean.embed_tokens, scale),
            embedding_scale=scale,
            final_norm=ScaledNorm(norm, eps, 1 / config.logits_scaling),
        )


class Ministral3(ModelFamily):
    """Rotated queries are multiplied by a number that grows with their positions."""

    peculiar = "its queries grow with their positions"

    def is_lean(self, config: Any, *, where: Where) -> bool:
        numbers = _llama_4_scale(config)
        if not all(isinstance(x, int | float) for x in numbers) or numbers[1] <= 0:
            return False
        # Layers' types do not tell here which have a window: all, or none.
        return config.sliding_window is None and super().is_lean(config, where=where)

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        lean = super().lean_model(stock, heads_may_differ=heads_may_differ)
        return replace(lean, query_scale=QueryScale(*_llama_4_scale(stock.config)))


def _llama_4_scale(config: Any) -> tuple[Any, Any]:
    rope = config.rope_parameters
    return rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")


def _refusing(model_type: str, **options: bool) -> ModelFamily:
    return ModelFamily(model_type, may_be_generic=False, **options)


FAMILIES = {
    family.model_type: family
    for family in (
        _refusing("llama"),  # 1-3.x, SmolLM2 and others: optional biases, any rope scaling
        _refusing("mistral"),  # early versions attend through a window (see `context_limit`)
        _refusing("qwen2"),  # and Qwen2.5: biases on q, k and v
        _refusing("qwen3", has_qk_norm=True),  # the dense ones
        Ministral3("ministral3"),
        SomeLayersRotate("smollm3"),
        ModelFamily("seed_oss"),  # a bias of o_proj, or none
        Granite("granite"),
        ModelFamily("olmo2", has_qk_norm=True, normed_sums=True, float32_tables=True),
        RopesByType("olmo3", has_qk_norm=True, normed_sums=True, float32_tables=True),
        SlidingLayersRotate("exaone4", has_qk_norm=True, normed_sums=True),
        Routed("qwen3_moe", has_qk_norm=True, rounds_weights=True),  # dense layers, too
        Routed("mixtral"),
        GptOss("gpt_oss", rounds_weights=True),
        ModelFamily("phi3", fuses=True),  # Phi-4 too; those with long and short factors are generic
        Gemma3("gemma3_text", has_qk_norm=True),
        Gemma4("gemma4_text", has_qk_norm=True),  # the dense ones without inputs of each layer
    )
}
# Those whose models have lean layers wherever they run.
ALWAYS_LEAN = sorted(name for name, family in FAMILIES.items() if not family.may_be_generic)
