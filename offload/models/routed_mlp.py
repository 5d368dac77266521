"""An MLP of experts of a stock model, dense or packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpu_ops import routed_linear
from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.routed_linear import ExpertChoice, Gate, RoutedLinear, run_experts
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.linear import GpuLinear
from gpu_ops.routed_linear import GpuExperts, GpuRoutedMlp, SharedExpert, run_experts_reference
from offload.models.packed_experts import ExpertMatrix
from offload.models.packed_linear import PackedMatrix


class RoutedMlp:
    """A stock module with a router, `gate` or `router`, and `experts`.

    Args:
        module: of transformers; its weights load, tie and save as it does it. Dense ones that it
            has [num_experts, in, out] are put into memory as the kernels read them.
        choice: as its router chooses.
        gate: what its experts do with the outputs of their first matrix.

    Raises:
        NotImplementedError: experts are in the place of transformers' own.
    """

    def __init__(self, module: Any, choice: ExpertChoice, gate: Gate) -> None:
        self._module, self._choice, self._gate = module, choice, gate
        self._router = router_of(module)
        for name in ("gate_up_proj", "down_proj"):
            matrix = getattr(module.experts, name)
            if isinstance(matrix, nn.Parameter) and module.experts.is_transposed:
                matrix.data = matrix.data.transpose(1, 2).contiguous().transpose(1, 2)
        self._made: tuple[RoutedLinear, RoutedLinear] | None = None
        self._gpu: GpuRoutedMlp | None = None

    def __call__(self, x: Tensor, pool: WorkerPool | None = None) -> Tensor:
        """x [n, hidden_size] -> the same; of a CPU and on a pool by kernels, else by torch."""
        if x.is_cuda and self._stays_on_host:
            return self._run_from_host(x)
        if pool is None or x.is_cuda:
            found = self._module(x[None])
            out: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
            return out
        _, weights, experts = self._router(x)
        up, down = self._experts()
        weights = weights.detach().float().contiguous()
        return run_experts(pool, up, down, x.contiguous(), experts.contiguous(), weights)

    def on_cpu(self) -> routed_linear.RoutedMlp:
        """Kernels over the weights where they are now, in the CPU's memory; nothing is copied but a
        router on a GPU."""
        bias = getattr(self._router, "bias", None)
        biases = None if bias is None else [bias.detach().cpu()]
        router = CpuLinear([self._router.weight.detach().cpu()], biases)
        return routed_linear.RoutedMlp(router, *self._experts(), self._choice)

    def on_gpu(self) -> GpuRoutedMlp:
        """Kernels over the weights where they are now.

        Raises: as `PackedLinear.on_gpu`.
        """
        router = self._router
        if self._gpu is None or self._gpu.up.device != router.weight.device:
            self._gpu = self._with_router(*self.matrices())
        return self._gpu

    def with_slots(self, num_slots: int) -> GpuRoutedMlp:
        """The router's and the shared expert's kernels where they are now, over copies there of the
        first `num_slots` experts; 0: over experts that are not there, for its choice alone.

        Raises: as `on_gpu`.
        """
        device: torch.device = self._router.weight.device
        up, down = self.matrices()
        if num_slots:
            up, down = up.first(num_slots, device), down.first(num_slots, device)
        return replace(self._with_router(up, down), shared=self.shared_on_gpu())

    def matrices(self) -> tuple[GpuExperts, GpuExperts]:
        """Of gate and up, and of down, of all experts where they are now, as a GPU's kernels read
        them."""
        up, gate = self._on_gpu("gate_up_proj"), self._gate
        up.clamp = (gate.alpha, gate.limit) if gate.kind == "clamped" else None
        return up, self._on_gpu("down_proj")

    def _with_router(self, up: GpuExperts, down: GpuExperts) -> GpuRoutedMlp:
        router, choice = self._router, self._choice
        bias = getattr(router, "bias", None)
        return GpuRoutedMlp(
            GpuLinear(router.weight.detach(), None if bias is None else bias.detach()),
            up,
            down,
            per_token=choice.per_token,
            normalises=choice.normalises,
            rounds=choice.rounds,
        )

    def shared_on_gpu(self) -> SharedExpert | None:
        """What a GPU adds to the sum of experts that are run elsewhere; None: nothing."""
        return None

    def _run_from_host(self, x: Tensor) -> Tensor:
        """x through experts whose weights are copied to its device, one expert after the other."""
        _, weights, experts = self._router(x)
        return run_experts_reference(*self.matrices(), x, experts, weights.float())

    @property
    def _stays_on_host(self) -> bool:
        device: torch.device = next(self._module.experts.parameters()).device
        return device.type == "cpu"

    def _on_gpu(self, name: str) -> GpuExperts:
        matrix, bias = self._parameters(name)
        if isinstance(matrix, ExpertMatrix):
            made = matrix.on_gpu()
        else:
            assert isinstance(matrix, Tensor)
            made = GpuExperts(matrix.contiguous(), self.num_experts)
        made.bias = bias
        return made

    def _experts(self) -> tuple[RoutedLinear, RoutedLinear]:
        """Weights are not replaced once a model is loaded: these are made once."""
        if self._made is None:
            up = self._projection("gate_up_proj", self._gate)
            self._made = up, self._projection("down_proj")
        return self._made

    def _projection(self, name: str, gate: Gate | None = None) -> RoutedLinear:
        matrix, bias = self._parameters(name)
        weight = matrix.packed if isinstance(matrix, PackedMatrix) else matrix
        return RoutedLinear(weight, matrix.dtype, self.num_experts, bias, gate=gate)

    def _parameters(self, name: str) -> tuple[PackedMatrix | Tensor, Tensor | None]:
        """Matrices, dense ones [num_experts, out, in], and biases of the projection `name`."""
        experts = self._module.experts
        matrix: Any = getattr(experts, name)
        bias = getattr(experts, f"{name}_bias", None)
        if isinstance(matrix, Tensor):
            matrix = matrix.detach()
            matrix = matrix.transpose(1, 2) if experts.is_transposed else matrix
        return matrix, None if bias is None else bias.detach()

    @property
    def num_experts(self) -> int:
        return len(self._router.weight)


def router_of(module: Any) -> Any:
    """The module of a stock MLP of experts that chooses them."""
    return module.router if hasattr(module, "router") else module.gate
