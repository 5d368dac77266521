"""Where weights are: in huge pages of the host, or fused into one matrix.

Decoding reads every weight once per token, so it runs at the speed of memory, and with 4 KiB pages
that is the speed of address translation: one thread of a 2-core EPYC reads 30 GB/s from huge pages,
24 from a mapped file and 20 from ordinary memory. transformers leaves weights in mapped files, or
in ordinary memory where it has converted them.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

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
