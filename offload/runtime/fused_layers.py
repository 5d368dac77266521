"""Decode steps of layers with the gated delta rule, and of those between them, by fused kernels.

Each is called in the place of a decoder layer's `forward` (Qwen3.5, dense or with experts, and
Qwen3-Next): some native calls instead of sixty operators of torch. Other passes, and layers
that were hooked or changed to what the kernels do not compute, go to the stock one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from cpu_ops.linear import Linear
from cpu_ops.rms_norm import rms_norm
from cpu_ops.routed_linear import run_experts
from cpu_ops.worker_pool import WorkerPool
from offload.models.base import OnePlusNorm, fused_linear, norm_of
from offload.models.hybrid import (
    TYPES,
    DeltaWeights,
    MlpWithShared,
    dense_mlp,
    rule_projections,
)
from offload.runtime.generic_cache import GenericCache

T = TypeVar("T")


class _Mixer:
    """x += out(delta rule(projections(norm(x)))) of a layer with linear attention."""

    def __init__(self, layer: Any) -> None:
        mixer = layer.linear_attn
        self._layer_idx = int(mixer.layer_idx)
        self.norm = norm_of(OnePlusNorm(layer.input_layernorm))
        self._into = rule_projections(mixer).on_cpu()
        self._out = fused_linear("", mixer, "out_proj").on_cpu()
        self._rule = DeltaWeights.of(mixer).on_cpu()

    def __call__(self, pool: WorkerPool, x: Tensor, cache: GenericCache) -> Tensor:
        states: Any = cache.layers[self._layer_idx]
        kept = states.conv_states[0], states.recurrent_states[0]
        # A row of each sequence at a time: those of a draft follow each other.
        parts = torch.split(self._into(pool, x, norm=self.norm), len(kept[0]))
        mixed = torch.cat([self._rule(pool, rows, *kept) for rows in parts])
        return self._out(pool, mixed, residual=x)


class _Attention:
    """x += out(attention(projections(norm(x))) * sigmoid(gate)), with a gate of each query head."""

    def __init__(self, layer: Any) -> None:
        mixer = layer.self_attn
        self.layer_idx, self._head_dim = int(mixer.layer_idx), int(mixer.head_dim)
        self._norm = norm_of(OnePlusNorm(layer.input_layernorm))
        self._norms = norm_of(OnePlusNorm(mixer.q_norm)), norm_of(OnePlusNorm(mixer.k_norm))
        self._into = fused_linear("", mixer, "q_proj", "k_proj", "v_proj").on_cpu()
        self._out = fused_linear("", mixer, "o_proj").on_cpu()
        if self._head_dim % 16:
            raise NotImplementedError("the store pads such heads")

    def __call__(
        self,
        pool: WorkerPool,
        x: Tensor,
        cache: GenericCache,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        n, width = len(x), self._out.in_features
        projected = self._into(pool, x, norm=self._norm)
        heads = projected[:, : 2 * width].view(n, -1, 2, self._head_dim)
        queries = heads[:, :, 0].reshape(n, width)
        qkv = torch.cat([queries, projected[:, 2 * width :]], 1)
        rows = n // rope[0].shape[1], rope[0].shape[1], -1
        cos, sin = (table.expand(rows).flatten(0, 1).contiguous() for table in rope)
        attended = cache.decode(self.layer_idx, qkv, (cos, sin), self._norms, mask)
        gated = attended.view(n, -1, self._head_dim) * heads[:, :, 1].sigmoid()
        return self._out(pool, gated.view(n, width), residual=x)


class _Mlp:
    """x += down(silu(gate) * up of norm(x))."""

    def __init__(self, layer: Any) -> None:
        self._norm = norm_of(OnePlusNorm(layer.post_attention_layernorm))
        self._gate_up, self._down = (linear.on_cpu() for linear in dense_mlp(layer.mlp))

    def __call__(self, pool: WorkerPool, x: Tensor) -> Tensor:
        gate_up = self._gate_up(pool, x, norm=self._norm)
        return self._down(pool, gate_up, silu_mul=True, residual=x)


class _Experts:
    """x += experts of y + sigmoid(gate of y) * the expert that all meet, with y = norm(x)."""

    def __init__(self, layer: Any) -> None:
        mlp = layer.mlp
        self._norm = norm_of(OnePlusNorm(layer.post_attention_layernorm))
        self._routed = MlpWithShared.of(mlp).on_cpu()
        self._gate = fused_linear("", mlp, "shared_expert_gate").on_cpu()
        self._gate_up, self._down = (linear.on_cpu() for linear in dense_mlp(mlp.shared_expert))

    def __call__(self, pool: WorkerPool, x: Tensor) -> Tensor:
        routed, normed = self._routed, rms_norm(pool, x, *self._norm)
        chosen = routed.choice(routed.router(pool, normed))
        of_experts = run_experts(pool, routed.up, routed.down, normed, *chosen)
        shared = self._down(pool, self._gate_up(pool, normed), silu_mul=True)
        share = self._gate(pool, normed).sigmoid_()
        return x + of_experts.add_(shared.mul_(share))


def _made(kind: Callable[[Any], T], layer: Any) -> T | None:
    """Kernels of a part of the layer; None if they do not compute what it is."""
    try:
        return kind(layer)
    except (NotImplementedError, ValueError):
        return None


class _FusedForward:
    """In the place of `forward` of a decoder layer."""

    def __init__(self, layer: Any, pool: WorkerPool, decodes: Callable[[], bool]) -> None:
        self._layer, self._pool, self._decodes = layer, pool, decodes
        self._stock = layer.forward
        self._mixer: _Mixer | _Attention | None = None
        self._mlp: _Mlp | _Experts | None = None
        self._made_of: object = None

    def __call__(self, x: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        fits = 0 < num_rows <= Linear.max_rows and 1 in x.shape[:2]
        fits = fits and x.dtype == self._layer.input_layernorm.weight.dtype
        if not (self._decodes() and fits and self._is_fused()):
            out: Tensor = self._stock(x, past_key_values=past_key_values, **kwargs)
            return out
        layer, rows, mixer = self._layer, x.reshape(num_rows, -1).contiguous(), self._mixer
        if isinstance(mixer, _Mixer):
            rows = mixer(self._pool, rows, past_key_values)
        elif mixer is not None and past_key_values.can_decode(mixer.layer_idx):
            rope, mask = kwargs["position_embeddings"], kwargs.get("attention_mask")
            rows = mixer(self._pool, rows, past_key_values, rope, mask)
        else:
            normed = layer.input_layernorm(x)
            if hasattr(layer, "linear_attn"):
                mixed = layer.linear_attn(normed, cache_params=past_key_values, **kwargs)
            else:
                mixed, _ = layer.self_attn(normed, past_key_values=past_key_values, **kwargs)
            rows = rows + mixed.view(rows.shape)
        if self._mlp is not None:
            return self._mlp(self._pool, rows).view(x.shape)
        mixed = rows.view(x.shape)
        of_mlp: Tensor = layer.mlp(layer.post_attention_layernorm(mixed))
        return mixed + of_mlp

    def _is_fused(self) -> bool:
        """Whether a part of the layer, as it is now, has kernels; makes them anew."""
        made_of = self._current()
        if made_of is None:
            return False
        if made_of != self._made_of:
            layer = self._layer
            self._made_of = made_of
            is_linear, is_dense = hasattr(layer, "linear_attn"), hasattr(layer.mlp, "gate_proj")
            self._mixer = _made(_Mixer, layer) if is_linear else _made(_Attention, layer)
            self._mlp = _made(_Mlp, layer) if is_dense else _made(_Experts, layer)
        return self._mixer is not None or self._mlp is not None

    def _current(self) -> object:
        """What the kernels are made of: modules, and tensors with their versions; None if a hook
        waits for a call."""
        modules = [self._layer]
        for module in modules:  # which grows; `modules()` takes four times as long
            modules += filter(None, module._modules.values())
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
