"""Modules of a stock model whose matrices a decode step multiplies on the worker pool.

Each is called in the place of a module's `forward`; passes that are no decode step, and inputs that
the kernels do not take, go to the stock one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpu_ops.linear import Linear
from cpu_ops.routed_linear import RoutedLinear
from cpu_ops.worker_pool import WorkerPool
from offload.models.packed_experts import PackedExperts, routed_sum
from offload.models.packed_linear import PackedLinear, PackedMatrix, PackedModule

# Up to so many tokens of a prompt meet packed weights on the pool, where torch has better products
# of many rows, too: torch's threads would contend with the pool's at every operator.
POOLED_TOKENS = 256
_SMALL = 2**20  # elements of a matrix that one thread multiplies as fast


class _PooledLinear:
    """A matrix, and maybe its bias; made anew where the module's weights are replaced."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._linear: Linear | None = None
        self._address = 0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._linear is None or self._address != weight.data_ptr():
            self._linear = Linear([weight.detach()], [None if bias is None else bias.detach()])
            self._address = weight.data_ptr()
        return self._linear(self._pool, x)


class _PooledForward:
    """In the place of `forward` of an `nn.Linear`."""

    def __init__(self, module: Any, pool: WorkerPool, decodes: Callable[[], bool]) -> None:
        self._module, self._decodes = module, decodes
        self._stock, self._linear = module.forward, _PooledLinear(pool)

    def __call__(self, x: Tensor) -> Tensor:
        weight, num_rows = self._module.weight, x.numel() // x.shape[-1]
        if not (self._decodes() and 0 < num_rows <= Linear.max_rows and x.dtype == weight.dtype):
            out: Tensor = self._stock(x)
            return out
        rows = x.reshape(num_rows, x.shape[-1]).contiguous()
        return self._linear(rows, weight, self._module.bias).view(*x.shape[:-1], len(weight))


class _PooledExperts:
    """In the place of `forward` of experts whose matrices are one parameter: those that tokens are
    routed to are multiplied one after the other."""

    def __init__(self, module: Any, pool: WorkerPool, decodes: Callable[[], bool]) -> None:
        self._module, self._decodes, self._stock = module, decodes, module.forward
        self._linears = {
            name: [_PooledLinear(pool) for _ in range(module.num_experts)]
            for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        }

    def __call__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module = self._module
        dtype = module.down_proj.dtype
        if not (self._decodes() and 0 < len(x) <= Linear.max_rows and x.dtype == dtype):
            out: Tensor = self._stock(x, top_k_index, top_k_weights)
            return out
        return routed_sum(module, x, top_k_index, top_k_weights, self._multiply)

    def _multiply(self, name: str, expert: int, x: Tensor) -> Tensor:
        weight = getattr(self._module, name)[expert]
        bias = getattr(self._module, f"{name}_bias")[expert] if self._module.has_bias else None
        return self._linears[name][expert](x.contiguous(), weight, bias)


class _PooledPacked:
    """In the place of `forward` of packed weights, of prompts, too: torch cannot read them."""

    def __init__(self, module: PackedModule, pool: WorkerPool, _: Callable[[], bool]) -> None:
        self._module, self._pool, self._address = module, pool, 0

    def __call__(self, x: Tensor) -> Tensor:
        module, pool = self._module, self._pool
        if self._address != module.codes.data_ptr():
            self._linear = PackedLinear([module])
            self._kernels = self._linear.on_cpu()
            bias = None if module.bias is None else module.bias.detach()[None]
            self._as_expert = RoutedLinear(module.packed, module.dtype, 1, bias)
            self._address = module.codes.data_ptr()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self._linear.prefers_cpu_ops(rows):
            out = self._kernels(pool, rows)
        elif 0 < len(rows) <= POOLED_TOKENS:
            out = self._as_expert(pool, rows, torch.zeros(len(rows), 1, dtype=torch.int64))
        else:
            out = self._linear(rows, pool)
        return out.view(*x.shape[:-1], module.out_features)


class _PooledPackedExperts:
    """In the place of `forward` of packed experts, of prompts, too: torch cannot read them."""

    def __init__(self, module: PackedExperts, pool: WorkerPool, _: Callable[[], bool]) -> None:
        self._module, self._pool = module, pool

    def __call__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self._module.run(self._pool, x, top_k_index, top_k_weights)


def use_pool(model: Any, pool: WorkerPool, decodes: Callable[[], bool] | None) -> None:
    """Let a stock model multiply on the pool: packed weights always, and if `decodes` is given all
    others where it says so. Threads of torch would spin beside those of the attention."""
    for module in model.modules():
        kind = _pooled_forward(module)
        if kind is not None and (kind in (_PooledPacked, _PooledPackedExperts)) == (
            decodes is None
        ):
            module.forward = kind(module, pool, decodes or (lambda: False))


def multiplies_on_pool(model: Any) -> bool:
    """Whether all of a model's large matrices are packed: torch then has small operators alone."""
    kinds = [*model.modules()]
    return any(isinstance(each, PackedMatrix) for each in kinds) and all(
        not isinstance(each, nn.Linear) or each.weight.numel() <= _SMALL for each in kinds
    )


def _pooled_forward(
    module: Any,
) -> type[_PooledForward | _PooledExperts | _PooledPacked | _PooledPackedExperts] | None:
    """What can stand in for the `forward` of a module; None: nothing."""
    if isinstance(module, PackedModule):
        return _PooledPacked
    if isinstance(module, PackedExperts):
        return _PooledPackedExperts
    if type(module) is nn.Linear:
        return _PooledForward if module.weight.is_contiguous() else None
    down = getattr(module, "down_proj", None)
    names = ("has_gate", "has_bias", "is_transposed", "num_experts")
    if not isinstance(down, Tensor) or not all(hasattr(module, name) for name in names):
        return None
    up = module.gate_up_proj if module.has_gate else module.up_proj
    if module.is_transposed or down.dim() != 3 or not (down.is_contiguous() and up.is_contiguous()):
        return None
    return _PooledExperts
