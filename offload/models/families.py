"""The model types that have lean layers: what each computes that the others do not.

A new family is one line of `FAMILIES`, or a subclass where its stock modules have other names
or its layers differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from cpu_ops.routed_linear import ExpertChoice
from offload.models.base import (
    DecoderLayer,
    LayerSpec,
    LeanModel,
    OnePlusNorm,
    RoundedNorm,
    ScaledEmbedding,
    ScaledNorm,
    check_alike,
    check_computation,
    context_limit,
    fused_linear,
    has_windows,
)
from offload.models.packed_experts import native_gate
from offload.models.rope import NoRotation, RotaryOfHalves, RotaryOfType, RoundedRotary, rotary_view
from offload.models.routed_mlp import RoutedMlp
from offload.models.shape import ModelShape

# What computes lean layers: the native ones, a GPU's step (or an inline one), or several ranks.
Where = Literal["cpu", "gpu", "ranks"]


@dataclass(frozen=True)
class ModelFamily:
    """Llama-like models of one `config.model_type`, as transformers' `…ForCausalLM` has them.

    Attributes:
        has_qk_norm: query and key heads have an RMSNorm before the rotary embedding.
        normed_sums: RMSNorms are of what attention and the MLP add, not of what they read.
        float32_tables: its rotary embedding does not round cos and sin.
        fuses: queries, keys and values are one projection, gate and up another.
        may_be_generic: what the lean layers do not compute, transformers' modules do; else it is
            refused.
    """

    model_type: str
    has_qk_norm: bool = False
    normed_sums: bool = False
    float32_tables: bool = False
    fuses: bool = False
    may_be_generic: bool = True

    @property
    def packs_as_generic(self) -> bool:
        """Whether `generic_packing` loads packed weights of quantised checkpoints."""
        return self.fuses

    @property
    def packs_dense(self) -> bool:
        """Whether `weights="q8"` and `"q4"` pack its dense checkpoints."""
        return True

    @property
    def knows_windows(self) -> bool:
        """Whether the lean layers attend through windows."""
        return self.fuses

    @property
    def peculiar(self) -> str:
        """What the native layers know, and ranks, training and benchmarks do not; "" if there is
        nothing."""
        if self.fuses:
            return "its projections are fused"
        return "its norms come after attention and the MLP" if self.normed_sums else ""

    def is_lean(self, config: Any, *, where: Where) -> bool:
        """Whether the lean layers compute all that transformers' `config` says."""
        if not self.may_be_generic:
            return True
        try:
            check_computation(config)
            if self.fuses and config.rope_parameters["rope_type"] == "longrope":
                # transformers reads a text anew where it gets longer than the short factors' range
                return False
            has_others = has_windows(config) and not self.knows_windows
            return not has_others and (where != "ranks" or not self.peculiar)
        except (NotImplementedError, ValueError):
            return False

    def check_plain(self) -> None:
        """NotImplementedError for a family that is not for all that lean layers are for."""
        if self.peculiar:
            raise NotImplementedError(
                f"{self.model_type} is not for calibration, training, benchmarks or ranks yet: "
                f"{self.peculiar}"
            )

    def rotates(self, attention: Any) -> bool:
        """Whether a layer's attention rotates queries and keys."""
        return True

    def rotary_modules(self, stock: Any) -> tuple[Any, ...]:
        """The distinct rotary embeddings; `LayerSpec.rope_idx` counts them."""
        layers, rotary = stock.model.layers, stock.model.rotary_emb
        if all(self.rotates(layer.self_attn) for layer in layers):
            return (rotary,)
        return rotary, NoRotation(int(layers[0].self_attn.head_dim))

    def layer_spec(self, stock: Any, layer_idx: int) -> LayerSpec:
        """What attention of a layer is."""
        config, attention = stock.config, stock.model.layers[layer_idx].self_attn
        return LayerSpec(
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=int(attention.head_dim),
            sm_scale=float(attention.scaling),
            rope_idx=0 if self.rotates(attention) else 1,
            has_qk_norm=self.has_qk_norm,
            window=self.window(stock, layer_idx),
        )

    def window(self, stock: Any, layer_idx: int) -> int:
        """How many tokens a layer sees; 0: all, or as many as there are positions."""
        config = stock.config
        if not (self.knows_windows and has_windows(config)):
            return 0
        attention = stock.model.layers[layer_idx].self_attn
        is_full = getattr(attention, "is_sliding", True) is False
        is_full = is_full or getattr(attention, "sliding_window", 0) is None
        return 0 if is_full else int(config.sliding_window)

    def layer(self, stock: Any, layer_idx: int, spec: LayerSpec) -> DecoderLayer:
        """A layer's weights before and after its attention."""
        stock_layer, name = stock.model.layers[layer_idx], f"model.layers.{layer_idx}"
        attention, in_attention = stock_layer.self_attn, f"{name}.self_attn."
        qkv = ("qkv_proj",) if self.fuses else ("q_proj", "k_proj", "v_proj")
        after_attention, after_mlp = None, None
        input_norm, mlp_norm = None, stock_layer.post_attention_layernorm
        if self.normed_sums:
            after_attention, mlp_norm = mlp_norm, None
            after_mlp = stock_layer.post_feedforward_layernorm
        else:
            input_norm = stock_layer.input_layernorm
        return DecoderLayer(
            input_norm=input_norm,
            qkv=fused_linear(in_attention, attention, *qkv),
            q_norm=attention.q_norm if spec.has_qk_norm else None,
            k_norm=attention.k_norm if spec.has_qk_norm else None,
            o_proj=fused_linear(in_attention, attention, "o_proj"),
            mlp_norm=mlp_norm,
            spec=spec,
            attention_out_norm=after_attention,
            mlp_out_norm=after_mlp,
            **self.mlp(stock, f"{name}.mlp."),
        )

    def mlp(self, stock: Any, name: str) -> dict[str, Any]:
        """The fields of a `DecoderLayer` for the stock module `name` (with a dot behind it)."""
        module = stock.get_submodule(name.removesuffix("."))
        gate_up = ("gate_up_proj",) if self.fuses else ("gate_proj", "up_proj")
        return {
            "gate_up": fused_linear(name, module, *gate_up),
            "down": fused_linear(name, module, "down_proj"),
        }

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
            self.check_plain()
            check_alike(specs, "calibration, training, benchmarks or ranks")
        most = {
            key: max(getattr(spec, name) for spec in specs)
            for key, name in (
                ("num_attention_heads", "num_qo_heads"),
                ("num_key_value_heads", "num_kv_heads"),
                ("head_dim", "head_dim"),
            )
        }
        dims = {spec.rope_idx: spec.head_dim for spec in specs}
        ropes = [
            rotary_view(
                rotary,
                dims.get(rope_idx, specs[0].head_dim),
                may_be_partial=bool(self.peculiar),
            )
            for rope_idx, rotary in enumerate(self.rotary_modules(stock))
        ]
        if self.float32_tables:
            ropes = [RoundedRotary(rope) for rope in ropes]
        max_context, reason = context_limit(config)
        windows = [spec.window for spec in specs]
        return LeanModel(
            embed_tokens=model.embed_tokens,
            layers=tuple(self.layer(stock, i, spec) for i, spec in enumerate(specs)),
            final_norm=model.norm,
            lm_head=fused_linear("", stock, "lm_head"),
            ropes=tuple(ropes),
            shape=replace(
                ModelShape.of_config(config.to_dict() | most, max_context),
                windows=tuple(windows) if any(windows) else (),
            ),
            max_context_reason=reason,
        )


class SomeLayersRotate(ModelFamily):
    """Layers without positions among others."""

    def rotates(self, attention: Any) -> bool:
        return bool(attention.use_rope)


class SlidingLayersRotate(ModelFamily):
    """Where a model has a window, as wide as the context or of no layer, layers without it do not
    rotate."""

    def rotates(self, attention: Any) -> bool:
        return attention.sliding_window is None or bool(attention.is_sliding)


class Gemma3(ModelFamily):
    """Norms times 1 + weight around attention and MLP, whose gate is a GELU, and two rotary
    embeddings: that of layers with a window, and that of the others."""

    packs_as_generic = knows_windows = True
    peculiar = "its norms come before and after attention and the MLP"

    def is_lean(self, config: Any, *, where: Where) -> bool:
        ropes = [rope["rope_type"] for rope in config.rope_parameters.values()]
        others = set(ropes) - {"default", "linear", "llama3", "yarn"}
        if others or config.use_bidirectional_attention:
            return False
        return super().is_lean(config, where=where)

    def rotary_modules(self, stock: Any) -> tuple[Any, ...]:
        rotary = stock.model.rotary_emb
        return tuple(RotaryOfType(rotary, kind) for kind in rotary.layer_types)

    def layer_spec(self, stock: Any, layer_idx: int) -> LayerSpec:
        kind = stock.config.layer_types[layer_idx]
        rope_idx = stock.model.rotary_emb.layer_types.index(kind)
        return replace(super().layer_spec(stock, layer_idx), rope_idx=rope_idx)

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
        made: dict[str, Any] = {name: OnePlusNorm(norm) for name, norm in norms.items()}
        return replace(super().layer(stock, layer_idx, spec), gate="gelu_tanh", **made)

    def lean_model(self, stock: Any, *, heads_may_differ: bool = False) -> LeanModel:
        lean = super().lean_model(stock, heads_may_differ=heads_may_differ)
        return replace(lean, final_norm=OnePlusNorm(lean.final_norm))


@dataclass(frozen=True)
class Routed(ModelFamily):
    """Experts in the place of an MLP, in all layers or some.

    Attributes:
        rounds_weights: the router's weights are rounded to the model's dtype.
    """

    rounds_weights: bool = False

    packs_as_generic = True
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


def _refusing(model_type: str, **options: bool) -> ModelFamily:
    return ModelFamily(model_type, may_be_generic=False, **options)


FAMILIES = {
    family.model_type: family
    for family in (
        _refusing("llama"),  # 1-3.x, SmolLM2 and others: optional biases, any rope scaling
        _refusing("mistral"),  # early versions attend through a window (see `context_limit`)
        _refusing("qwen2"),  # and Qwen2.5: biases on q, k and v
        _refusing("qwen3", has_qk_norm=True),  # the dense ones
        SomeLayersRotate("smollm3"),
        ModelFamily("seed_oss"),  # a bias of o_proj, or none
        Granite("granite"),
        ModelFamily("olmo2", has_qk_norm=True, normed_sums=True, float32_tables=True),
        SlidingLayersRotate("exaone4", has_qk_norm=True, normed_sums=True),
        Routed("qwen3_moe", has_qk_norm=True, rounds_weights=True),  # dense layers, too
        Routed("mixtral"),
        GptOss("gpt_oss", rounds_weights=True),
        ModelFamily("phi3", fuses=True),  # Phi-4 too; those with long and short factors are generic
        Gemma3("gemma3_text", has_qk_norm=True),
    )
}
# Those whose models have lean layers wherever they run.
ALWAYS_LEAN = sorted(name for name, family in FAMILIES.items() if not family.may_be_generic)
