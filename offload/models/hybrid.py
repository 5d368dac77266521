"""The lean view of a stock model with layers of the gated delta rule between those of attention:
Qwen3.5, dense or with experts, and Qwen3-Next. A GPU's decode steps compute with it.

Its layers are those of attention, which have keys and values; each knows the layers before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from cpu_ops.delta_rule import DeltaHeads, DeltaRule
from cpu_ops.routed_linear import ExpertChoice
from gpu_ops.delta_rule import GpuDeltaRule
from gpu_ops.routed_linear import GpuRoutedMlp, SharedExpert
from offload.models.base import (
    DecoderLayer,
    LayerSpec,
    LeanModel,
    OnePlusNorm,
    fused_linear,
    norm_of,
    stock_context_limit,
)
from offload.models.linear import Linear
from offload.models.packed_experts import native_gate
from offload.models.rope import RotaryOfTexts, rotary_view
from offload.models.routed_mlp import RoutedMlp
from offload.models.shape import ModelShape

TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # of a text model's config


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a gated delta rule, as `cpu_ops.delta_rule.DeltaRule` takes them."""

    heads: DeltaHeads
    conv: Tensor
    norm: tuple[Tensor, float]
    a_log: Tensor
    dt_bias: Tensor
    by_key_head: bool

    @classmethod
    def of(cls, mixer: Any) -> DeltaWeights:
        """Of a stock module; NotImplementedError for what the kernels do not compute."""
        if mixer.activation not in ("silu", "swish") or mixer.conv1d.bias is not None:
            raise NotImplementedError("a convolution with a bias or another activation")
        return cls(
            DeltaHeads(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim),
            mixer.conv1d.weight.detach().squeeze(1),
            norm_of(mixer.norm),
            mixer.A_log.detach(),
            mixer.dt_bias.detach(),
            hasattr(mixer, "in_proj_qkvz"),
        )

    @property
    def state_bytes(self) -> int:
        """What it keeps of a sequence."""
        heads = self.heads
        return self.conv.nbytes + 4 * heads.num_v_heads * heads.k_dim * heads.v_dim

    def on_cpu(self) -> DeltaRule:
        return DeltaRule(*self._weights, by_key_head=self.by_key_head)

    def on_gpu(self) -> GpuDeltaRule:
        return GpuDeltaRule(*self._weights, by_key_head=self.by_key_head)

    @property
    def _weights(self) -> tuple[DeltaHeads, Tensor, tuple[Tensor, float], Tensor, Tensor]:
        return self.heads, self.conv, self.norm, self.a_log, self.dt_bias


@dataclass(frozen=True)
class RecurrentLayer:
    """x += out(rule(into(norm(x)))), then the MLP.

    Attributes:
        number: among all layers of the stock model.
        layer: `qkv` is what the rule reads, `o_proj` is of what it gives.
    """

    number: int
    layer: DecoderLayer
    rule: DeltaWeights


@dataclass(frozen=True)
class HybridLayer(DecoderLayer):
    """A layer whose attention is times sigmoid(gate): `qkv` gives a query and a gate of each head,
    then keys and values.

    Attributes:
        before: layers between the one above and this.
    """

    before: tuple[RecurrentLayer, ...] = ()


@dataclass(frozen=True)
class HybridModel(LeanModel):
    """Attributes:
    numbers: of `layers` among all layers of the stock model.
    after: layers behind the last of `layers`.
    """

    numbers: tuple[int, ...] = ()
    after: tuple[RecurrentLayer, ...] = ()

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """All of them, in their order."""
        return [x for group in self.between for x in group]

    @property
    def state_bytes(self) -> int:
        """What they keep of a sequence."""
        return sum(layer.rule.state_bytes for layer in self.recurrent)

    @property
    def between(self) -> list[tuple[RecurrentLayer, ...]]:
        """Those before each of `layers`, and behind the last."""
        return [*(getattr(layer, "before", ()) for layer in self.layers), self.after]

    @property
    def mlp_order(self) -> list[list[int]]:
        pairs = zip(super().mlp_order, self.between, strict=True)
        return [[*above, *(x.number for x in group)] for above, group in pairs]

    @property
    def routed(self) -> dict[int, RoutedMlp]:
        layers = {x.number: x.layer for x in self.recurrent}
        layers |= zip(self.numbers, self.layers, strict=True)
        return {number: x.routed for number, x in layers.items() if x.routed is not None}


class MlpWithShared(RoutedMlp):
    """Experts, and one that all tokens meet, with a gate of its own, which a GPU alone computes."""

    @classmethod
    def of(cls, mlp: Any) -> MlpWithShared:
        """Of a stock module; NotImplementedError for another gate than silu."""
        gate = native_gate(mlp.experts)
        if gate is None or gate.kind != "silu":
            raise NotImplementedError("experts of another kind")
        normalises = getattr(mlp.gate, "norm_topk_prob", True)
        return cls(mlp, ExpertChoice(mlp.gate.top_k, normalises=normalises, rounds=True), gate)

    def on_gpu(self) -> GpuRoutedMlp:
        return replace(super().on_gpu(), shared=self.shared_on_gpu())

    def shared_on_gpu(self) -> SharedExpert | None:
        module = self._module
        gate = fused_linear("", module, "shared_expert_gate")
        return SharedExpert(gate.on_gpu(), *(x.on_gpu() for x in dense_mlp(module.shared_expert)))


def hybrid_model(stock: Any) -> HybridModel:
    """The view of a stock model of one of `TYPES`.

    Raises:
        NotImplementedError: a layer that the kernels do not compute.
    """
    config, model = stock.config, stock.model
    layers, before, numbers = list[DecoderLayer](), list[RecurrentLayer](), list[int]()
    for number, stock_layer in enumerate(model.layers):
        if hasattr(stock_layer, "linear_attn"):
            before.append(_recurrent(stock_layer, number))
        else:
            layers.append(_attention(stock_layer, tuple(before)))
            numbers.append(number)
            before.clear()
    if not layers:
        raise NotImplementedError("no layer attends")
    spec = layers[0].spec
    sizes = config.to_dict()
    sizes |= {
        "num_hidden_layers": len(layers),
        "num_attention_heads": spec.num_qo_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
    }
    sizes.setdefault("intermediate_size", sizes.get("moe_intermediate_size"))
    most, reason = stock_context_limit(config)
    rope: Any = rotary_view(model.rotary_emb, spec.head_dim, may_be_partial=True)
    if hasattr(model.rotary_emb, "mrope_section"):
        rope = RotaryOfTexts(rope)
    return HybridModel(
        embed_tokens=model.embed_tokens,
        layers=tuple(layers),
        final_norm=OnePlusNorm(model.norm),
        lm_head=fused_linear("", stock, "lm_head"),
        ropes=(rope,),
        shape=ModelShape.of_config(sizes, most),
        max_context_reason=reason,
        numbers=tuple(numbers),
        after=tuple(before),
    )


def _attention(layer: Any, before: tuple[RecurrentLayer, ...]) -> HybridLayer:
    attention = layer.self_attn
    head_dim = int(attention.head_dim)
    return HybridLayer(
        input_norm=OnePlusNorm(layer.input_layernorm),
        qkv=fused_linear("", attention, "q_proj", "k_proj", "v_proj"),
        q_norm=OnePlusNorm(attention.q_norm),
        k_norm=OnePlusNorm(attention.k_norm),
        o_proj=fused_linear("", attention, "o_proj"),
        mlp_norm=OnePlusNorm(layer.post_attention_layernorm),
        spec=LayerSpec(
            num_qo_heads=attention.o_proj.in_features // head_dim,
            num_kv_heads=attention.k_proj.out_features // head_dim,
            head_dim=head_dim,
            sm_scale=float(attention.scaling),
            has_qk_norm=True,
        ),
        before=before,
        **_mlp(layer.mlp),
    )


def _recurrent(layer: Any, number: int) -> RecurrentLayer:
    mixer = layer.linear_attn
    made = DecoderLayer(
        input_norm=OnePlusNorm(layer.input_layernorm),
        qkv=rule_projections(mixer),
        q_norm=None,
        k_norm=None,
        o_proj=fused_linear("", mixer, "out_proj"),
        mlp_norm=OnePlusNorm(layer.post_attention_layernorm),
        spec=LayerSpec(0, 0, 0, 0.0),
        **_mlp(layer.mlp),
    )
    return RecurrentLayer(number, made, DeltaWeights.of(mixer))


def rule_projections(mixer: Any) -> Linear:
    """What a stock module's rule reads."""
    names = ("qkvz", "ba") if hasattr(mixer, "in_proj_qkvz") else ("qkv", "z", "b", "a")
    return fused_linear("", mixer, *[f"in_proj_{name}" for name in names])


def _mlp(mlp: Any) -> dict[str, Any]:
    if hasattr(mlp, "gate_proj"):
        gate_up, down = dense_mlp(mlp)
        return {"gate_up": gate_up, "down": down}
    return {"gate_up": None, "down": None, "routed": MlpWithShared.of(mlp)}


def dense_mlp(mlp: Any) -> tuple[Linear, Linear]:
    """gate ++ up, and down; NotImplementedError for another activation than silu."""
    if not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation):
        raise NotImplementedError("another activation")
    return fused_linear("", mlp, "gate_proj", "up_proj"), fused_linear("", mlp, "down_proj")
