"""Weights as torch has them: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.linear import has_products
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.linear import GpuLinear
from offload.models.linear import Linear

# By the first of the modules.
_fused: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor | None]] = WeakKeyDictionary()


class DenseLinear(Linear):
    """A `Linear` of plain `nn.Linear` modules of one dtype."""

    _modules: tuple[nn.Linear, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self._modules[0].weight.dtype

    @property
    def device(self) -> torch.device:
        return self._modules[0].weight.device

    def __call__(self, x: Tensor, pool: WorkerPool | None = None) -> Tensor:
        if pool is not None and self.prefers_cpu_ops(x):
            return self.on_cpu()(pool, x.contiguous())
        y: list[Tensor] = [module(x) for module in self._modules]
        return y[0] if len(y) == 1 else torch.cat(y, dim=-1)

    def prefers_cpu_ops(self, x: Tensor) -> bool:
        return x.is_cpu and len(x) > 0 and has_products(x.dtype)

    def on_cpu(self) -> CpuLinear:
        return CpuLinear(*zip(*self._tensors(), strict=True))

    def on_gpu(self) -> GpuLinear:
        return GpuLinear(*_fuse(self._modules))

    def keep_rows(self, *rows: range) -> None:
        for module, kept in zip(self._modules, rows, strict=True):
            part = slice(kept.start, kept.stop)
            module.weight.data = module.weight.data[part].clone()
            if module.bias is not None:
                module.bias.data = module.bias.data[part].clone()
            module.out_features = len(kept)

    def keep_columns(self, columns: range, *, keeps_bias: bool) -> None:
        for module in self._modules:
            module.weight.data = module.weight.data[:, columns.start : columns.stop].clone(
                memory_format=torch.contiguous_format
            )
            if not keeps_bias:
                module.bias = None  # type: ignore[assignment]
            module.in_features = len(columns)

    def dequantise(self) -> Tensor:
        return torch.cat([weight for weight, _ in self._tensors()])

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for module in self._modules:
            yield module.weight.detach(), None if module.bias is None else module.bias.detach()


def _fuse(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
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
