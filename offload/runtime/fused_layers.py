"""Decode steps of layers with the gated delta rule, and of those between them, by fused kernels.

Each is called in the place of a decoder layer's `forward` (Qwen3.5, dense or with experts, and
Qwen3-Next): five native calls instead of some sixty operators of torch. Other passes, and layers
that were hooked or changed to what the kernels do not compute, go to the stock one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from cpu_ops.delta_rule import DeltaHeads, DeltaRule
from cpu_ops.linear import Linear
from cpu_ops.worker_pool import WorkerPool
from offload.models.base import OnePlusNorm, fused_linear, norm_of
from offload.runtime.generic_cache import GenericCache

TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # of a text model's config


class _Mixer:
    """x += out(delta rule(projections(norm(x)))) of a layer with linear attention."""

    def __init__(self, layer: Any) -> None:
        mixer = layer.linear_attn
        self._layer_idx = int(mixer.layer_idx)
        self.norm = norm_of(OnePlusNorm(layer.input_layernorm))
        by_key_head = hasattr(mixer, "in_proj_qkvz")
        names = ("qkv", "z", "b", "a") if not by_key_head else ("qkvz", "ba")
        self._into = fused_linear("", mixer, *[f"in_proj_{name}" for name in names]).on_cpu()
        self._out = fused_linear("", mixer, "out_proj").on_cpu()
        if mixer.activation not in ("silu", "swish") or mixer.conv1d.bias is not None:
            raise NotImplementedError("a convolution with a bias or another activation")
        self._rule = DeltaRule(
            DeltaHeads(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim),
            mixer.conv1d.weight.detach().squeeze(1),
            norm_of(mixer.norm),
            mixer.A_log.detach(),
            mixer.dt_bias.detach(),
            by_key_head=by_key_head,
        )

    def __call__(self, pool: WorkerPool, x: Tensor, cache: GenericCache) -> Tensor:
        states: Any = cache.layers[self._layer_idx]
        projected = self._into(pool, x, norm=self.norm)
        mixed = self._rule(pool, projected, states.conv_states[0], states.recurrent_states[0])
        return self._out(pool, mixed, residual=x)


class _Mlp:
    """x += down(silu(gate) * up of norm(x))."""

    def __init__(self, layer: Any) -> None:
        mlp = layer.mlp
        if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
            raise NotImplementedError("another activation")
        self._norm = norm_of(OnePlusNorm(layer.post_attention_layernorm))
        self._gate_up = fused_linear("", mlp, "gate_proj", "up_proj").on_cpu()
        self._down = fused_linear("", mlp, "down_proj").on_cpu()

    def __call__(self, pool: WorkerPool, x: Tensor) -> Tensor:
        gate_up = self._gate_up(pool, x, norm=self._norm)
        return self._down(pool, gate_up, silu_mul=True, residual=x)


class _FusedForward:
    """In the place of `forward` of a decoder layer."""

    def __init__(self, layer: Any, pool: WorkerPool, decodes: Callable[[], bool]) -> None:
        self._layer, self._pool, self._decodes = layer, pool, decodes
        self._stock = layer.forward
        self._mixer: _Mixer | None = None
        self._mlp: _Mlp | None = None
        self._made_of: object = None

    def __call__(self, x: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        if not (self._decodes() and 0 < len(x) <= Linear.max_rows and self._is_fused(x)):
            out: Tensor = self._stock(x, past_key_values=past_key_values, **kwargs)
            return out
        layer, rows = self._layer, x.view(len(x), -1)
        if self._mixer is not None:
            rows = self._mixer(self._pool, rows, past_key_values)
        else:
            normed = layer.input_layernorm(x)
            attended, _ = layer.self_attn(normed, past_key_values=past_key_values, **kwargs)
            rows = rows + attended.view(rows.shape)
        if self._mlp is not None:
            return self._mlp(self._pool, rows).view(x.shape)
        mixed = rows.view(x.shape)
        of_mlp: Tensor = layer.mlp(layer.post_attention_layernorm(mixed))
        return mixed + of_mlp

    def _is_fused(self, x: Tensor) -> bool:
        """Whether a part of the layer, as it is now, has kernels; makes them anew."""
        made_of = self._current()
        if made_of is None:
            return False
        if made_of != self._made_of:
            layer = self._layer
            self._made_of, self._mixer, self._mlp = made_of, None, None
            is_linear = hasattr(layer, "linear_attn")
            try:
                self._mixer = _Mixer(layer) if is_linear else None
                self._mlp = _Mlp(layer) if hasattr(layer.mlp, "gate_proj") else None
            except (NotImplementedError, ValueError):
                self._mixer = self._mlp = None
            if is_linear and self._mixer is None:
                self._mlp = None
        return self._mixer is not None or self._mlp is not None

    def _current(self) -> object:
        """What the kernels are made of: modules, and tensors with their versions; None if a hook
        waits for a call."""
        modules = [*self._layer.modules()]
        if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
            return None
        tensors = [
            x
            for module in modules
            for x in chain(module._parameters.values(), module._buffers.values())
            if x is not None
        ]
        places = [*map(Tensor.data_ptr, tensors)]
        return [*map(id, modules)], places, [*map(attrgetter("_version"), tensors)]


def use_fused_layers(model: Any, pool: WorkerPool, decodes: Callable[[], bool]) -> None:
    """Let decode steps of a stock model's layers run on the pool, if it is of one of `TYPES`."""
    if model.config.model_type not in TYPES:
        return
    for layer in model.model.layers:
        layer.forward = _FusedForward(layer, pool, decodes)
