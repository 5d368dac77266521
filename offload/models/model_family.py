"""What the lean layers of a model type compute, and how they are found in its stock model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from offload.models.base import (
    DecoderLayer,
    LayerSpec,
    LeanModel,
    check_alike,
    check_computation,
    context_limit,
    fused_linear,
    has_windows,
)
from offload.models.rope import NoRotation, RotaryOfType, RoundedRotary, rotary_view
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
    def has_other_matrices(self) -> bool:
        """Whether its matrices have other names or sizes than `matrix_sizes`."""
        return False

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

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU's step knows that, too."""
        return True

    def is_lean(self, config: Any, *, where: Where) -> bool:
        """Whether the lean layers compute all that transformers' `config` says."""
        try:
            check_computation(config)
            if self.fuses and config.rope_parameters["rope_type"] == "longrope":
                # transformers reads a text anew where it gets longer than the short factors' range
                return False
            has_others = has_windows(config) and not self.knows_windows
            knows = where == "cpu" or not self.peculiar or (where == "gpu" and self.on_gpu)
            return knows and not has_others
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
            num_kv_heads=config.num_attention_heads // attention.num_key_value_groups,
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
        after_attention, after_mlp = None, None
        input_norm, mlp_norm = None, stock_layer.post_attention_layernorm
        if self.normed_sums:
            after_attention, mlp_norm = mlp_norm, None
            after_mlp = stock_layer.post_feedforward_layernorm
        else:
            input_norm = stock_layer.input_layernorm
        return DecoderLayer(
            input_norm=input_norm,
            qkv=fused_linear(in_attention, attention, *self.projections(attention)),
            q_norm=attention.q_norm if spec.has_qk_norm else None,
            k_norm=attention.k_norm if spec.has_qk_norm else None,
            o_proj=fused_linear(in_attention, attention, "o_proj"),
            mlp_norm=mlp_norm,
            spec=spec,
            attention_out_norm=after_attention,
            mlp_out_norm=after_mlp,
            **self.mlp(stock, f"{name}.mlp."),
        )

    def projections(self, attention: Any) -> tuple[str, ...]:
        """The names of the modules that make queries, keys and values."""
        return ("qkv_proj",) if self.fuses else ("q_proj", "k_proj", "v_proj")

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


class RopesByType(ModelFamily):
    """Two rotary embeddings: that of layers with a window, and that of the others."""

    knows_windows = True
    ropes = frozenset(("default", "linear", "llama3", "yarn"))

    def is_lean(self, config: Any, *, where: Where) -> bool:
        if {rope["rope_type"] for rope in config.rope_parameters.values()} - self.ropes:
            return False
        return super().is_lean(config, where=where)

    def rotary_modules(self, stock: Any) -> tuple[Any, ...]:
        rotary = stock.model.rotary_emb
        return tuple(RotaryOfType(rotary, kind) for kind in rotary.layer_types)

    def layer_spec(self, stock: Any, layer_idx: int) -> LayerSpec:
        kind = stock.config.layer_types[layer_idx]
        rope_idx = stock.model.rotary_emb.layer_types.index(kind)
        return replace(super().layer_spec(stock, layer_idx), rope_idx=rope_idx)
