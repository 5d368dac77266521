"""Experts of a stock model whose matrices are packed, all of one projection in one piece, or stay
on the host while a GPU computes with them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu_ops.packed import PackedWeight
from cpu_ops.routed_linear import Gate, RoutedLinear, run_experts
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.routed_linear import GpuExperts
from gpu_ops.routed_linear import run_experts as run_experts_on_gpu
from offload.models.packed_linear import PackedMatrix, rows_on_gpu

_FEW_TOKENS = 32  # of which a GPU multiplies each pair of a token and an expert by itself


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
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    for expert in sorted({*top_k_index.flatten().tolist()}):
        if expert >= module.num_experts:
            continue
        tokens, places = torch.where(top_k_index == expert)
        inner = multiply(up, expert, x[tokens])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = multiply("down_proj", expert, inner)
        if _has_norm(module):
            found = module.post_expert_norm(found)
        part = (found * top_k_weights[tokens, places, None]).float()
        if x.is_cuda:
            out.index_add_(0, tokens, part.detach())
            continue
        # NumPy works on this thread; torch's index_add_ wakes a team beside those of the pool.
        at, sums = tokens.numpy(), out.numpy()
        if len(at) == 1 or bool((at[1:] > at[:-1]).all()):  # as it is, unless an expert comes twice
            sums[at] += part.detach().numpy()
        else:
            np.add.at(sums, at, part.detach().numpy())
    return out.to(x.dtype)


class ExpertMatrix(PackedMatrix):
    """The matrices of one projection, [num_experts * out_features, in_features]."""

    def __init__(
        self, weight: PackedWeight, dtype: torch.dtype, num_experts: int, *, is_transposed: bool
    ) -> None:
        super().__init__(weight, dtype)
        self.num_experts, self.is_transposed = num_experts, is_transposed
        self._gpu: GpuExperts | None = None

    def stock_name(self, path: str) -> str:
        return path

    def of_stock(self) -> Tensor:
        values = super().of_stock().view(self.num_experts, -1, self.in_features)
        return values.transpose(1, 2).contiguous() if self.is_transposed else values

    def of(self, expert: int) -> PackedWeight:
        size = self.out_features // self.num_experts
        return self.packed.rows(slice(expert * size, (expert + 1) * size))

    def on_gpu(self) -> GpuExperts:
        """As a GPU's kernels read them, which the parameters become parts of."""
        if self._gpu is None or not self._gpu.reads(self.codes):
            self._gpu = GpuExperts(rows_on_gpu(self), self.num_experts)
        return self._gpu


class PackedExperts(nn.Module):
    """In the place of transformers' experts, whose matrices are [num_experts, out, in] or, if they
    are transposed, [num_experts, in, out]. What is not packed stays as it is, on a CPU where x may
    be on a GPU: chosen experts are copied there, one at a time."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self._of = (stock,)  # no submodule
        self._addresses: list[int] = []
        self._made: tuple[RoutedLinear, RoutedLinear] | None = None
        self._is_native = False
        for name, parameter in stock.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @property
    def is_transposed(self) -> bool:
        """Of matrices that are not packed."""
        return bool(self._of[0].is_transposed)

    def pack(self, name: str, weight: PackedWeight, dtype: torch.dtype) -> None:
        """The matrices of the projection `name` become packed."""
        del self._parameters[name]
        stock = self._of[0]
        made = ExpertMatrix(weight, dtype, stock.num_experts, is_transposed=stock.is_transposed)
        delattr(stock, name)  # which is kept for its activation
        self.add_module(name, made)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.run(None, x, top_k_index, top_k_weights)

    def run(
        self, pool: WorkerPool | None, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """`routed_sum`; on a pool few tokens of an expert are rounded to int8."""
        stock = self._of[0]
        is_there = next(self.parameters()).is_cuda
        if is_there and len(x) <= _FEW_TOKENS and (kernels := self._on_gpu()):
            weights = top_k_weights.detach().float().contiguous()
            x, experts = x.detach().contiguous(), top_k_index.contiguous()
            return run_experts_on_gpu(*kernels, x, experts, weights)
        if pool is None:
            return routed_sum(stock, x, top_k_index, top_k_weights, self._multiply)
        up, down = self._kernels()
        x, experts = x.detach().contiguous(), top_k_index.long().contiguous()
        weights = top_k_weights.detach().float().contiguous()
        if self._is_native:
            return run_experts(pool, up, down, x, experts, weights)
        inner = up(pool, x, experts)
        inner = stock._apply_gate(inner) if stock.has_gate else stock.act_fn(inner)
        flat = experts.view(-1, 1)
        found = down(pool, inner.flatten(0, 1).contiguous(), flat).view(*experts.shape, -1)
        if _has_norm(stock):
            found = stock.post_expert_norm(found)
        routed = torch.where(experts < stock.num_experts, weights, 0.0)
        return (found.float() * routed.unsqueeze(-1)).sum(1).to(x.dtype)

    def _multiply(self, name: str, expert: int, x: Tensor) -> Tensor:
        matrix: Any = getattr(self, name)
        stock = self._of[0]
        bias = getattr(self, f"{name}_bias")[expert].to(x.device) if stock.has_bias else None
        if isinstance(matrix, Tensor):
            weight = matrix[expert].to(x.device, non_blocking=True)
            return F.linear(x, weight.t() if stock.is_transposed else weight, bias)
        if x.is_cuda:
            y: Tensor = matrix.on_gpu().multiply(x, expert)  # which may know of the bias
            return y if bias is None or matrix.on_gpu().bias is not None else y + bias
        return F.linear(x, matrix.of(expert).dequantise(matrix.dtype), bias)

    def _on_gpu(self) -> tuple[GpuExperts, GpuExperts] | None:
        """Kernels of up and down; None, where a GPU's do not compute all of it."""
        stock, made = self._of[0], list[GpuExperts]()
        gate = native_gate(stock)
        if gate is None or _has_norm(stock):
            return None
        for name in ("gate_up_proj", "down_proj"):
            matrix: Any = getattr(self, name)
            experts = matrix.on_gpu()
            experts.bias = getattr(self, f"{name}_bias").detach() if stock.has_bias else None
            made.append(experts)
        up, down = made
        up.clamp = (gate.alpha, gate.limit) if gate.kind == "clamped" else None
        return up, down

    def _kernels(self) -> tuple[RoutedLinear, RoutedLinear]:
        """Of up and down, over the weights where they are now."""
        stock = self._of[0]
        names = ("gate_up_proj" if stock.has_gate else "up_proj", "down_proj")
        matrices: list[Any] = [getattr(self, name) for name in names]
        addresses = [matrix.codes.data_ptr() for matrix in matrices]
        if self._made is None or self._addresses != addresses:
            gate = native_gate(stock)
            self._is_native = gate is not None and not _has_norm(stock)
            up, down = (
                RoutedLinear(
                    matrix.packed,
                    matrix.dtype,
                    stock.num_experts,
                    getattr(self, f"{name}_bias").detach() if stock.has_bias else None,
                    gate=gate if name != "down_proj" and self._is_native else None,
                )
                for name, matrix in zip(names, matrices, strict=True)
            )
            self._made, self._addresses = (up, down), addresses
        return self._made


def pack_experts(model: Any, name: str, weight: PackedWeight, dtype: torch.dtype) -> None:
    """The parameter `name` of a stock model, matrices of experts, becomes packed."""
    owner, _, projection = name.rpartition(".")
    experts = model.get_submodule(owner)
    if not isinstance(experts, PackedExperts):
        experts = PackedExperts(experts)
        model.set_submodule(owner, experts)
    experts.pack(projection, weight, dtype)


def _has_norm(stock: Any) -> bool:
    return getattr(stock, "has_post_expert_norm", False)  # of newer versions of transformers


def native_gate(experts: Any) -> Gate | None:
    """What the kernels compute in the place of the gate of transformers' experts, or of packed
    ones; None: torch computes it."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    stock = experts._of[0] if isinstance(experts, PackedExperts) else experts
    if not stock.has_gate:
        return None
    of_class = type(stock)._apply_gate
    if of_class is _default_apply_gate and isinstance(stock.act_fn, (nn.SiLU, SiLUActivation)):
        return Gate("silu")
    if of_class.__module__.endswith(".gpt_oss.modeling_gpt_oss"):
        return Gate("clamped", stock.alpha, stock.limit)
    return None
