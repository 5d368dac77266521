"""What a lean decoder layer is: the stock layer's weights, named in the order the data meets them.

Nothing is copied: a `DecoderLayer` refers to the modules of the stock model, so weights load, tie
and save as transformers does it. `offload/prefill` and `offload/decode` compute with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cpu_ops.native import check_head_dim
from offload.models.rope import head_dim_of, rope_context, rotary_view
from offload.models.shape import ModelShape

if TYPE_CHECKING:
    from offload.ranks.group import TensorParallel


@dataclass(frozen=True)
class DecoderLayer:
    """One pre-norm layer: x += o(attention(qkv(norm(x)))); x += down(silu(gate) * up of norm(x)).

    `q_norm` and `k_norm` are RMSNorms over head_dim, before the rotary embedding, or None.
    """

    input_norm: nn.Module
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    o_proj: nn.Linear
    mlp_norm: nn.Module
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


@dataclass(frozen=True)
class LeanModel:
    """A stock causal language model as this runtime sees it.

    Attributes:
        rotary_emb: (x, position_ids [1, n]) -> (cos, sin), each [1, n, head_dim] in x's dtype.
        sm_scale: multiplies q @ k.
        max_context_reason: what bounds `shape.max_context`, for messages.
        ranks: the processes that run the model together, each with a part of the heads and of the
            MLP (`shape` and `layers` are this one's); None: this process has all.
    """

    embed_tokens: nn.Module
    layers: tuple[DecoderLayer, ...]
    final_norm: nn.Module
    lm_head: nn.Linear
    rotary_emb: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    shape: ModelShape
    sm_scale: float
    max_context_reason: str
    ranks: TensorParallel | None = None

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The output of o_proj or down_proj [n, hidden_size], of which each rank has a summand."""
        return x if self.ranks is None else self.ranks.all_reduce(x)


def lean_model(stock: Any, *, has_qk_norm: bool) -> LeanModel:
    """The lean view of `stock`, a Llama-like `…ForCausalLM` of transformers.

    Raises:
        NotImplementedError: if a projection is not a plain linear layer (quantised weights and
            adapters replace them), or the model computes something that the lean layers do not.
    """
    config, model = stock.config, stock.model
    check_computation(config)
    layers = tuple(
        _decoder_layer(layer, f"model.layers.{layer_idx}", has_qk_norm)
        for layer_idx, layer in enumerate(model.layers)
    )
    attention = model.layers[0].self_attn
    head_dim = int(attention.head_dim)
    max_context, reason = context_limit(config)
    return LeanModel(
        embed_tokens=model.embed_tokens,
        layers=layers,
        final_norm=model.norm,
        lm_head=_linear(stock.lm_head, "lm_head"),
        rotary_emb=rotary_view(model.rotary_emb, head_dim),
        shape=ModelShape.of_config(config.to_dict() | {"head_dim": head_dim}, max_context),
        sm_scale=float(attention.scaling),
        max_context_reason=reason,
    )


def check_computation(config: Any) -> None:
    """Refuse what would change the computation without changing the weights' names.

    Raises:
        NotImplementedError: an activation or a soft cap that is not supported.
        ValueError: heads of a width that the kernels do not take, or a pad token that is none of
            the vocabulary's.
    """
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotImplementedError(
            f"hidden_act={activation!r}: that activation is not supported yet; available: silu"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise NotImplementedError(
                f"{name}={getattr(config, name)} is not supported yet: a soft cap of logits; take "
                "a model without one"
            )
    check_head_dim(head_dim_of(config))
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and not (type(pad) is int and -config.vocab_size <= pad < config.vocab_size):
        raise ValueError(f"pad_token_id={pad!r} is not among the {config.vocab_size} tokens")


def context_limit(config: Any) -> tuple[int, str]:
    """(tokens, what bounds them): the positions of the model, or a smaller sliding window.

    Inside its window a sliding-window layer computes full attention, so a context that fits is
    exact; a longer one is refused instead of being answered with the wrong attention.

    Raises: as `rope_context`.
    """
    positions, reason = rope_context(config)
    # A class that knows no window keeps one of config.json without using it, as Llama's does.
    window = config.sliding_window if hasattr(type(config), "sliding_window") else None
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    if window is not None and slides and window < positions:
        return int(window), f"sliding_window={window}; sliding-window layers are not supported yet"
    return positions, reason


def _decoder_layer(stock_layer: Any, name: str, has_qk_norm: bool) -> DecoderLayer:
    attention, mlp = stock_layer.self_attn, stock_layer.mlp
    return DecoderLayer(
        input_norm=stock_layer.input_layernorm,
        q_proj=_linear(attention.q_proj, f"{name}.self_attn.q_proj"),
        k_proj=_linear(attention.k_proj, f"{name}.self_attn.k_proj"),
        v_proj=_linear(attention.v_proj, f"{name}.self_attn.v_proj"),
        q_norm=attention.q_norm if has_qk_norm else None,
        k_norm=attention.k_norm if has_qk_norm else None,
        o_proj=_linear(attention.o_proj, f"{name}.self_attn.o_proj"),
        mlp_norm=stock_layer.post_attention_layernorm,
        gate_proj=_linear(mlp.gate_proj, f"{name}.mlp.gate_proj"),
        up_proj=_linear(mlp.up_proj, f"{name}.mlp.up_proj"),
        down_proj=_linear(mlp.down_proj, f"{name}.mlp.down_proj"),
    )


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise NotImplementedError(
            f"{name} is a {type(module).__name__}, not a plain Linear: quantised weights and "
            "adapters are not supported; merge or dequantise them first"
        )
    return module
