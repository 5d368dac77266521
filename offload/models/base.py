"""What a lean decoder layer is: the stock layer's weights, named in the order the data meets them.

Nothing is copied: a `DecoderLayer` refers to the modules of the stock model, so weights load, tie
and save as transformers does it. `offload/prefill` and `offload/decode` compute with them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from cpu_ops.decoder_layers import FusedLayer, M, Norm, W
from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.native import check_head_dim
from cpu_ops.routed_linear import RoutedMlp as CpuRoutedMlp
from gpu_ops.linear import GpuLinear
from gpu_ops.routed_linear import GpuRoutedMlp
from offload.models.dense_linear import DenseLinear
from offload.models.linear import Linear
from offload.models.missing_features import OWN_ATTENTION
from offload.models.packed_linear import PackedLinear, PackedModule
from offload.models.rope import QueryScale, Rotary, head_dim_of, layer_configs, rope_context
from offload.models.routed_mlp import RoutedMlp
from offload.models.shape import ModelShape

if TYPE_CHECKING:
    from offload.ranks.group import TensorParallel

T = TypeVar("T")

ALIBI_POSITIONS = 2**21  # of types without a number of positions; 2**24 have digits
_WINDOWLESS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)  # others with windows are generic, or know them

# Soft caps that are computed.
_CAPS = {("final_logit_softcapping", "gemma4_text")}

# By the type of the stock modules.
_FORMATS: dict[type[nn.Module], Callable[[Sequence[Any]], Linear]] = {
    nn.Linear: DenseLinear,
    PackedModule: PackedLinear,
}


@dataclass(frozen=True)
class LayerSpec:
    """What the attention of one layer is.

    Attributes:
        sm_scale: multiplies q @ k.
        rope_idx: which of `LeanModel.ropes` rotates queries and keys.
        window: how many tokens attention sees, the last ones; 0: all.
        has_qk_norm: whether an RMSNorm comes before the rotation, of each head or of all at once.
        softcap: scores are softcap * tanh(score / softcap); 0: not capped.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    rope_idx: int = 0
    has_qk_norm: bool = False
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: x += o(attention(qkv(norm(x)))); x += down(f(gate) * up of norm(x)).

    Attributes:
        q_norm, k_norm: RMSNorms before the rotary embedding, over head_dim or over all heads at
            once, or None.
        input_norm, mlp_norm: of x, or None.
        attention_out_norm, mlp_out_norm: RMSNorms of what is added to x, or None.
        routed: the MLP, where it has experts, instead of gate_up and down.
        gate: f, "silu" or "gelu_tanh".
        sinks: float32 [num_qo_heads], logits that join each softmax and have no value; or None.
        v_norm: RMSNorm of each head of values, with the eps of `q_norm`; or None.
        out_scale: multiplies x behind the MLP.
    """

    input_norm: nn.Module | None
    qkv: Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    o_proj: Linear
    mlp_norm: nn.Module | None
    gate_up: Linear | None
    down: Linear | None
    spec: LayerSpec
    attention_out_norm: nn.Module | None = None
    mlp_out_norm: nn.Module | None = None
    routed: RoutedMlp | None = None
    gate: str = "silu"
    sinks: torch.Tensor | None = None
    v_norm: nn.Module | None = None
    out_scale: float = 1.0

    @property
    def dense_mlp(self) -> tuple[Linear, Linear]:
        """gate_up and down, where there are no experts."""
        assert self.gate_up is not None
        assert self.down is not None
        return self.gate_up, self.down

    def on_cpu(self) -> FusedLayer[CpuLinear, CpuRoutedMlp]:
        routed = None if self.routed is None else self.routed.on_cpu()
        return self._with_kernels(lambda linear: linear.on_cpu(), routed)

    def on_gpu(self, *, has_experts: bool = True) -> FusedLayer[GpuLinear, GpuRoutedMlp]:
        """Kernels there; without `has_experts` these are left out, as they stay on the host."""
        routed = self.routed.on_gpu() if self.routed is not None and has_experts else None
        return self._with_kernels(lambda linear: linear.on_gpu(), routed)

    def _with_kernels(self, make: Callable[[Linear], W], routed: M | None) -> FusedLayer[W, M]:
        has_qk_norm = self.q_norm is not None and self.k_norm is not None
        q_norm, eps = norm_of(self.q_norm) if has_qk_norm else (None, 0.0)

        def norm(module: nn.Module | None) -> Norm | None:
            return None if module is None else norm_of(module)

        return FusedLayer(
            input_norm=norm(self.input_norm),
            qkv=make(self.qkv),
            q_norm=q_norm,
            k_norm=norm_of(self.k_norm)[0] if has_qk_norm else None,
            qk_norm_eps=eps,
            o_proj=make(self.o_proj),
            mlp_norm=norm(self.mlp_norm),
            gate_up=None if self.gate_up is None else make(self.gate_up),
            down=None if self.down is None else make(self.down),
            attention_out_norm=norm(self.attention_out_norm),
            mlp_out_norm=norm(self.mlp_out_norm),
            rope_idx=self.spec.rope_idx,
            gate=self.gate,
            routed=routed,
            norms_all_heads=q_norm is not None and len(q_norm) != self.spec.head_dim,
            v_norm=None if self.v_norm is None else norm_of(self.v_norm)[0],
            out_scale=self.out_scale,
        )


@dataclass(frozen=True)
class LeanModel:
    """A stock causal language model as this runtime sees it.

    Attributes:
        ropes: distinct rotary embeddings, (x, position_ids [1, n]) -> (cos, sin), each
            [1, n, head_dim] in x's dtype; `LayerSpec.rope_idx` says which is a layer's.
        shape: where layers differ in their heads, the most that a layer has.
        max_context_reason: what bounds `shape.max_context`, for messages.
        host_experts: `numbers` of layers whose experts a GPU leaves to the CPU.
        hot_experts: experts of each of these, the most used ones, that it has copies of.
        embedding_scale: multiplies embeddings that are given; `embed_tokens` has done so.
        query_scale: multiplies the rotated queries of all layers; None: nothing does.
        logit_cap: c of logits c * tanh(x / c) of outputs x of `lm_head`; 0: logits are x.
        ranks: the processes that run the model together, each with a part of the heads and of the
            MLP (`shape` and `layers` are this one's); None: this process has all.
    """

    embed_tokens: nn.Module
    layers: tuple[DecoderLayer, ...]
    final_norm: nn.Module
    lm_head: Linear
    ropes: tuple[Rotary, ...]
    shape: ModelShape
    max_context_reason: str
    embedding_scale: float = 1.0
    query_scale: QueryScale | None = None
    logit_cap: float = 0.0
    host_experts: frozenset[int] = frozenset()
    hot_experts: int = 0
    ranks: TensorParallel | None = None

    def each(self, name: str) -> list[Any]:
        """An attribute of the spec of each layer."""
        return [getattr(layer.spec, name) for layer in self.layers]

    @property
    def numbers(self) -> Sequence[int]:
        """Of `layers` among all layers of the stock model."""
        return range(len(self.layers))

    @property
    def mlp_order(self) -> list[list[int]]:
        """The layers whose MLPs a step runs before the attention of each of `layers`, and behind
        the last, by their numbers in the stock model."""
        return [[], *([number] for number in self.numbers)]

    @property
    def routed(self) -> dict[int, RoutedMlp]:
        """MLPs of experts, by the number of their layer."""
        return {i: layer.routed for i, layer in enumerate(self.layers) if layer.routed is not None}

    @property
    def sinks(self) -> list[torch.Tensor | None]:
        """`DecoderLayer.sinks` of each layer."""
        return [layer.sinks for layer in self.layers]

    @property
    def sm_scales(self) -> list[float]:
        """Softmax scale of each layer."""
        return self.each("sm_scale")

    @property
    def sm_scale(self) -> float:
        """The scale of all layers, for parts that take one; NotImplementedError if they differ."""
        return self._shared("sm_scale", self.sm_scales)

    @property
    def rotary_emb(self) -> Rotary:
        """The rotary embedding of all layers; NotImplementedError if they differ."""
        self._shared("rope_idx", self.each("rope_idx"))
        return self.ropes[self.layers[0].spec.rope_idx]

    def _shared(self, name: str, values: Sequence[T]) -> T:
        for layer_idx, value in enumerate(values):
            if value != values[0]:
                raise NotImplementedError(
                    f"layer {layer_idx} has {name}={value}, layer 0 has {values[0]}: bounds of "
                    "host_bytes_per_sequence, training, calibration and benchmarks do not support "
                    "layers that differ yet"
                )
        return values[0]

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The output of o_proj or down [n, hidden_size], of which each rank has a summand."""
        return x if self.ranks is None else self.ranks.all_reduce(x)


def check_alike(specs: Sequence[LayerSpec], what: str) -> None:
    """Refuse `what` where layers differ in their heads: it has one shape for all.

    Raises:
        NotImplementedError: names the first layer that differs, and in what.
    """
    for layer_idx, spec in enumerate(specs):
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            first, own = getattr(specs[0], name), getattr(spec, name)
            if own != first:
                raise NotImplementedError(
                    f"layer {layer_idx} has {name}={own}, layer 0 has {first}: {what} "
                    "needs layers whose heads are alike yet; others decode with device='cpu' under "
                    "policies such as 'full', 'exact_topk' and 'lychee_cluster'"
                )


def check_computation(config: Any) -> None:
    """Refuse what would change the computation without changing the weights' names.

    Raises:
        NotImplementedError: an activation or a soft cap that is not supported.
        ValueError: heads of a width that the kernels do not take, or a pad token that is none of
            the vocabulary's.
    """
    name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    activation, known = getattr(config, name, "silu"), ["gelu_pytorch_tanh"]
    if name == "hidden_act":
        known = ["silu", "swish"]
    if activation not in known:
        raise NotImplementedError(
            f"{name}={activation!r}: that activation is not supported yet; available: {known[0]}"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) and (name, config.model_type) not in _CAPS:
            raise NotImplementedError(
                f"{name}={getattr(config, name)} is not supported yet: a soft cap of logits; take "
                "a model without one"
            )
    for of_layer in layer_configs(config):
        check_head_dim(head_dim_of(of_layer))
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and not (type(pad) is int and -config.vocab_size <= pad < config.vocab_size):
        raise ValueError(f"pad_token_id={pad!r} is not among the {config.vocab_size} tokens")


def context_limit(config: Any) -> tuple[int, str]:
    """(tokens, what bounds them): the positions of the model, or a smaller sliding window.

    Inside its window a sliding-window layer computes full attention, so of types whose layers know
    no windows a context that fits is exact; a longer one is refused instead of being answered with
    the wrong attention.

    Raises: as `rope_context`.
    """
    positions, reason = rope_context(config)
    # A class that knows no window keeps one of config.json without using it, as Llama's does.
    window = config.sliding_window if hasattr(type(config), "sliding_window") else None
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    if window is not None and slides and window < positions and config.model_type in _WINDOWLESS:
        return int(window), f"sliding_window={window}; sliding-window layers are not supported yet"
    return positions, reason


def stock_context_limit(config: Any) -> tuple[int, str]:
    """`context_limit` of a model that runs on transformers' own modules: they compute windows, and
    their rotary embeddings. Types without a number of positions have no bound: sys.maxsize; but for
    ALiBi, whose keys have their positions as digits (`offload.decode.alibi`)."""
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if type(positions) is not int:
        if config.model_type in OWN_ATTENTION:
            return ALIBI_POSITIONS, f"positions of ALiBi are counted to {ALIBI_POSITIONS}"
        return sys.maxsize, "it has no number of positions"
    with contextlib.suppress(NotImplementedError, ValueError):
        return rope_context(config)
    return positions, f"max_position_embeddings={positions}"


def has_windows(config: Any) -> bool:
    """Whether a layer attends through a window that is smaller than the context."""
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return window is not None and slides and window < rope_context(config)[0]


class ScaledNorm(nn.Module):
    """The RMSNorm of a stock module, with another eps, and its output times `scale`: as `norm_of`
    and prefills read it. A scale other than 1 copies the weight."""

    def __init__(self, stock: Any, eps: float, scale: float = 1.0) -> None:
        super().__init__()
        self.variance_epsilon = eps
        weight = stock.weight if scale == 1.0 else stock.weight.detach() * scale
        self.weight = nn.Parameter(weight, requires_grad=False) if scale != 1.0 else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


class OnePlusNorm(ScaledNorm):
    """The RMSNorm of a stock module whose output is times 1 + weight, which is copied and rounded
    to the model's dtype: transformers rounds their product only."""

    def __init__(self, stock: Any) -> None:
        super().__init__(stock, stock.eps)
        weight = (1.0 + stock.weight.detach().float()).to(stock.weight.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)


class UnitNorm(ScaledNorm):
    """The RMSNorm of a stock module that has no weight: it is one."""

    def __init__(self, stock: Any, width: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.variance_epsilon = stock.eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False)


class RoundedNorm(ScaledNorm):
    """The RMSNorm of a stock module that multiplies in float32; its weight is copied and rounded to
    `dtype`: transformers rounds the product only."""

    def __init__(self, stock: Any, dtype: torch.dtype) -> None:
        super().__init__(stock, stock.variance_epsilon)
        self.weight = nn.Parameter(stock.weight.detach().to(dtype), requires_grad=False)


class ScaledEmbedding(nn.Module):
    """The embedding of a stock module, times `scale`."""

    def __init__(self, stock: nn.Module, scale: float) -> None:
        super().__init__()
        self.stock, self.scale = stock, scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.stock(tokens) * self.scale
        return embedded


def norm_of(module: Any) -> Norm:
    """Weight and eps of an RMSNorm."""
    return module.weight.detach(), float(module.variance_epsilon)


def fused_linear(prefix: str, owner: Any, *names: str) -> Linear:
    """The projections `names` of a stock module, whose own name is `prefix`."""
    modules = [getattr(owner, name) for name in names]
    for name, module in zip(names, modules, strict=True):
        if type(module) not in _FORMATS or type(module) is not type(modules[0]):
            raise NotImplementedError(
                f"{prefix}{name} is a {type(module).__name__}, not a plain Linear: quantised "
                "weights and adapters are not supported; merge or dequantise them first"
            )
    return _FORMATS[type(modules[0])](modules)
