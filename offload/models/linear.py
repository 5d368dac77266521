"""What a projection of the model is, whatever its weights are made of.

A format of weights is one file that implements `Linear`, and a row of `base._FORMATS`; no other
part of `offload/` knows how weights are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.linear import GpuLinear


class Linear(ABC):
    """y = x @ concat(weights).T + concat(biases) of projections that have their input in common.

    The weights are those of the stock model's modules: they load, tie and save as transformers does
    it. Any number of rows goes through a call; a decode step runs on `on_cpu` or `on_gpu`, which
    also do the norm before, SwiGLU, and the sum with the residual stream after.

    Args:
        modules: of one format and dtype, with in_features, out_features and parameters.

    Attributes:
        parts: the projections one by one.
        in_features, out_features: elements of a row of x, and of y.
        dtype, device: of x and y.
        num_bytes: of weights and biases.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules: tuple[Any, ...] = tuple(modules)

    @property
    def parts(self) -> tuple[Linear, ...]:
        return tuple(type(self)([module]) for module in self._modules)

    @property
    def in_features(self) -> int:
        return int(self._modules[0].in_features)

    @property
    def out_features(self) -> int:
        return sum(module.out_features for module in self._modules)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for module in self._modules for part in module.parameters())

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def __call__(self, x: Tensor, pool: WorkerPool | None = None) -> Tensor:
        """x [..., in_features] -> [..., out_features].

        By torch, with gradients of x; or on `pool`, for x [n, in_features], if `prefers_cpu_ops`.
        """

    @abstractmethod
    def prefers_cpu_ops(self, x: Tensor) -> bool:
        """Whether `on_cpu` takes as many rows as x [n, in_features] has, no slower than torch."""

    @abstractmethod
    def on_cpu(self) -> CpuLinear:
        """Kernels over the weights where they are now, in the CPU's memory; nothing is copied."""

    @abstractmethod
    def on_gpu(self) -> GpuLinear:
        """Kernels over the weights in one piece, into which the modules' own are moved."""

    @abstractmethod
    def keep_rows(self, *rows: range) -> None:
        """Cut each part down to some of its outputs; the rest is freed."""

    @abstractmethod
    def keep_columns(self, columns: range, *, keeps_bias: bool) -> None:
        """Cut all parts down to some of their inputs: y is then a summand of several ranks'."""

    @abstractmethod
    def dequantise(self) -> Tensor:
        """A new tensor [out_features, in_features] of the weights in `dtype`."""
