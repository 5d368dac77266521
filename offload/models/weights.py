"""Weights of several layers, fused into one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack


def fuse_rows(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights [sum of out_features, in_features] of several layers as one, and their biases.

    The modules keep working and saving: their parameters become parts of the fused tensor, each
    with a storage of its own over the shared memory.
    """
    if len(modules) == 1:
        bias = modules[0].bias
        return modules[0].weight.detach(), None if bias is None else bias.detach()
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
    return weight, biases
