"""Experts of a stock model whose matrices are packed, all of one projection in one piece."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.packed import PackedWeight
from cpu_ops.worker_pool import WorkerPool
from offload.models.packed_linear import PackedLinear, PackedMatrix, PackedModule


class Multiply(Protocol):
    def __call__(self, name: str, expert: int, x: Tensor) -> Tensor:
        """x [n, in_features] through the projection `name` of an expert, with its bias."""


def routed_sum(
    module: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, multiply: Multiply
) -> Tensor:
    """What experts give that tokens are routed to, one expert after the other.

    Args:
        module: transformers' experts, or what stands for them.
        x: [num_tokens, hidden_size].
        top_k_index, top_k_weights: [num_tokens, k]; an index of num_experts stands for none.
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    for expert in sorted({*top_k_index.flatten().tolist()}):
        if expert >= module.num_experts:
            continue
        tokens, places = torch.where(top_k_index == expert)
        inner = multiply(up, expert, x[tokens])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = multiply("down_proj", expert, inner)
        if module.has_post_expert_norm:
            found = module.post_expert_norm(found)
        part = (found * top_k_weights[tokens, places, None]).float()
        # NumPy works on this thread; torch's index_add_ wakes a team beside those of the pool.
        at, sums = tokens.numpy(), out.numpy()
        if len(at) == 1 or bool((at[1:] > at[:-1]).all()):  # as it is, unless an expert comes twice
            sums[at] += part.detach().numpy()
        else:
            np.add.at(sums, at, part.detach().numpy())
    return out.to(x.dtype)


class _ExpertMatrix(PackedMatrix):
    """The matrices of one projection, [num_experts * out_features, in_features]."""

    def __init__(
        self, weight: PackedWeight, dtype: torch.dtype, num_experts: int, *, is_transposed: bool
    ) -> None:
        super().__init__(weight, dtype)
        self.num_experts, self.is_transposed = num_experts, is_transposed

    def stock_name(self, path: str) -> str:
        return path

    def of_stock(self) -> Tensor:
        values = super().of_stock().view(self.num_experts, -1, self.in_features)
        return values.transpose(1, 2).contiguous() if self.is_transposed else values

    def of(self, expert: int) -> PackedWeight:
        size = self.out_features // self.num_experts
        return self.packed.rows(slice(expert * size, (expert + 1) * size))


class PackedExperts(nn.Module):
    """In the place of transformers' experts, whose matrices are [num_experts, out, in] or, if they
    are transposed, [num_experts, in, out]."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self._of = (stock,)  # no submodule
        self._parts: dict[tuple[str, int], tuple[int, PackedLinear, CpuLinear]] = {}
        for name, parameter in stock.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def pack(self, name: str, weight: PackedWeight, dtype: torch.dtype) -> None:
        """The matrices of the projection `name` become packed."""
        del self._parameters[name]
        stock = self._of[0]
        made = _ExpertMatrix(weight, dtype, stock.num_experts, is_transposed=stock.is_transposed)
        delattr(stock, name)  # which is kept for its activation
        self.add_module(name, made)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.run(None, x, top_k_index, top_k_weights)

    def run(
        self, pool: WorkerPool | None, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """`routed_sum`, on a pool if there is one."""

        def multiply(name: str, expert: int, x: Tensor) -> Tensor:
            linear, kernels = self._part(name, expert)
            if pool is not None and linear.prefers_cpu_ops(x):
                return kernels(pool, x.contiguous())
            return linear(x, pool)

        return routed_sum(self._of[0], x, top_k_index, top_k_weights, multiply)

    def _part(self, name: str, expert: int) -> tuple[PackedLinear, CpuLinear]:
        matrix: Any = getattr(self, name)
        address, key = matrix.codes.data_ptr(), (name, expert)
        if key not in self._parts or self._parts[key][0] != address:
            bias = getattr(self, f"{name}_bias")[expert] if self._of[0].has_bias else None
            linear = PackedLinear([PackedModule(matrix.of(expert), bias, matrix.dtype)])
            self._parts[key] = address, linear, linear.on_cpu()
        return self._parts[key][1:]
