"""Weights of several layers, fused into one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from cpu_ops.decoder_layers import FusedLayer, Norm, W
from cpu_ops.linear import Linear
from offload.models.base import DecoderLayer

# By the first of the modules.
_fused: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor | None]] = WeakKeyDictionary()


def fuse_rows(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights [sum of out_features, in_features] of several layers as one, and their biases.

    The modules keep working and saving: their parameters become parts of the fused tensor, each
    with a storage of its own over the shared memory.
    """
    if len(modules) == 1:
        bias = modules[0].bias
        return modules[0].weight.detach(), None if bias is None else bias.detach()
    known = _fused.get(modules[0])
    if known is not None and known[0].data_ptr() == modules[0].weight.data_ptr():
        return known
    weight = torch.cat([module.weight.detach() for module in modules])
    biases = None
    if any(module.bias is not None for module in modules):
        biases = torch.cat(
            [
                weight.new_zeros(module.out_features)
                if module.bias is None
                else module.bias.detach()
                for module in modules
            ]
        )
    first = 0
    for module in modules:
        part = slice(first, first + module.out_features)
        module.weight.data = from_dlpack(weight[part])
        if module.bias is not None and biases is not None:
            module.bias.data = from_dlpack(biases[part])
        first += module.out_features
    _fused[modules[0]] = weight, biases
    return weight, biases


def native_linear(modules: Sequence[nn.Linear]) -> Linear:
    """Several layers with the same input as one of `cpu_ops`, over their own weights."""
    weights = [module.weight.detach() for module in modules]
    biases = [None if module.bias is None else module.bias.detach() for module in modules]
    return Linear(weights, biases)


def fuse_layer(layer: DecoderLayer, fuse: Callable[[Sequence[nn.Linear]], W]) -> FusedLayer[W]:
    """`layer` with q, k, v as one projection, and gate, up."""
    has_qk_norm = layer.q_norm is not None and layer.k_norm is not None
    q_norm, eps = norm_of(layer.q_norm) if has_qk_norm else (None, 0.0)
    return FusedLayer(
        input_norm=norm_of(layer.input_norm),
        qkv=fuse([layer.q_proj, layer.k_proj, layer.v_proj]),
        q_norm=q_norm,
        k_norm=norm_of(layer.k_norm)[0] if has_qk_norm else None,
        qk_norm_eps=eps,
        o_proj=fuse([layer.o_proj]),
        mlp_norm=norm_of(layer.mlp_norm),
        gate_up=fuse([layer.gate_proj, layer.up_proj]),
        down=fuse([layer.down_proj]),
    )


def norm_of(module: Any) -> Norm:
    """Weight and eps of an RMSNorm."""
    return module.weight.detach(), float(module.variance_epsilon)
