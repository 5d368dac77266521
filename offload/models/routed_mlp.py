"""An MLP of experts of a stock model, dense or packed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cpu_ops import routed_linear
from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.routed_linear import ExpertChoice, Gate, RoutedLinear, run_experts
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.linear import GpuLinear
from gpu_ops.routed_linear import GpuExperts, GpuRoutedMlp
from offload.models.packed_experts import ExpertMatrix
from offload.models.packed_linear import PackedMatrix


class RoutedMlp:
    """A stock module with a router, `gate`, and `experts` of silu(gate) * up.

    Args:
        module: of transformers; its weights load, tie and save as it does it.
        choice: as its router chooses.

    Raises:
        NotImplementedError: experts are in the place of transformers' own.
    """

    def __init__(self, module: Any, choice: ExpertChoice) -> None:
        self._module, self._choice = module, choice
        self._made: tuple[RoutedLinear, RoutedLinear] | None = None
        self._gpu: GpuRoutedMlp | None = None

    def __call__(self, x: Tensor, pool: WorkerPool | None = None) -> Tensor:
        """x [n, hidden_size] -> the same; of a CPU and on a pool by kernels, else by torch."""
        if pool is None or x.is_cuda:
            out: Tensor = self._module(x[None])[0]
            return out
        _, weights, experts = self._module.gate(x)
        up, down = self._experts()
        weights = weights.detach().float().contiguous()
        return run_experts(pool, up, down, x.contiguous(), experts.contiguous(), weights)

    def on_cpu(self) -> routed_linear.RoutedMlp:
        """Kernels over the weights where they are now, in the CPU's memory; nothing is copied."""
        router = CpuLinear([self._module.gate.weight.detach()])
        return routed_linear.RoutedMlp(router, *self._experts(), self._choice)

    def on_gpu(self) -> GpuRoutedMlp:
        """Kernels over the weights where they are now.

        Raises: as `PackedLinear.on_gpu`.
        """
        if self._gpu is None or self._gpu.up.device != self._module.gate.weight.device:
            choice = self._choice
            self._gpu = GpuRoutedMlp(
                GpuLinear(self._module.gate.weight.detach()),
                self._on_gpu("gate_up_proj"),
                self._on_gpu("down_proj"),
                per_token=choice.per_token,
                normalises=choice.normalises,
                rounds=choice.rounds,
            )
        return self._gpu

    def _on_gpu(self, name: str) -> GpuExperts:
        matrix: nn.Module | Tensor = getattr(self._module.experts, name)
        if isinstance(matrix, ExpertMatrix):
            return matrix.on_gpu()
        assert isinstance(matrix, Tensor)
        return GpuExperts(matrix.detach(), self._num_experts)

    def _experts(self) -> tuple[RoutedLinear, RoutedLinear]:
        """Weights are not replaced once a model is loaded: these are made once."""
        if self._made is None:
            up = self._projection("gate_up_proj", Gate("silu"))
            self._made = up, self._projection("down_proj")
        return self._made

    def _projection(self, name: str, gate: Gate | None = None) -> RoutedLinear:
        experts = self._module.experts
        matrix: nn.Module | Tensor = getattr(experts, name)
        if isinstance(matrix, PackedMatrix):
            return RoutedLinear(matrix.packed, matrix.dtype, self._num_experts, gate=gate)
        assert isinstance(matrix, Tensor)
        return RoutedLinear(matrix.detach(), matrix.dtype, self._num_experts, gate=gate)

    @property
    def _num_experts(self) -> int:
        return len(self._module.gate.weight)
