"""Packed matrices of experts: tokens meet those that they are routed to, in one native call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.linear import check_packed
from cpu_ops.native import check_tensor, dtype_code, isa_name
from cpu_ops.packed import FORMAT_CODES, PackedWeight
from cpu_ops.worker_pool import WorkerPool

GATES = {"none": 0, "silu": 1, "clamped": 2}  # ExpertGate of cpp/operators/routed_linear.h
_PAIRS = 4096  # of a token and an expert at a time: 32 MiB of scratch at 2,048 features


@dataclass(frozen=True)
class Gate:
    """What becomes of an expert's outputs.

    Attributes:
        kind: `none`; `silu`, of silu(first half) * second half; `clamped`, of (up + 1) * gate *
            sigmoid(alpha * gate), with gates in the even outputs, at most `limit`, and up in the
            odd ones, between -limit and limit.
    """

    kind: str = "none"
    alpha: float = 0.0
    limit: float = 0.0


class RoutedLinear:
    """One projection of all experts.

    Up to 16 rows of an expert are rounded to int8 in groups of 32, as `PackedLinear` does; more
    meet weights that are unpacked tile by tile.

    Args:
        weight: [num_experts * out_features, in_features], one expert after the other; kept.
        dtype: of x, outputs and the bias.
        bias: [num_experts, out_features] or None.
        gate: of the outputs.
        isa: an ISA other than the process's (tests).
    """

    def __init__(
        self,
        weight: PackedWeight,
        dtype: torch.dtype,
        num_experts: int,
        bias: Tensor | None = None,
        *,
        gate: Gate | None = None,
        isa: str | None = None,
    ) -> None:
        gate = gate or Gate()
        check_packed("weight", weight, weight.in_features)
        if num_experts < 1 or weight.out_features % num_experts:
            raise ValueError(
                f"num_experts must divide the {weight.out_features} rows of the weight, got "
                f"{num_experts}"
            )
        if gate.kind not in GATES:
            raise ValueError(f"unknown gate {gate.kind!r}; available: {', '.join(GATES)}")
        out_features = weight.out_features // num_experts
        if gate.kind != "none" and out_features % 2:
            raise ValueError(f"a gate needs an even number of outputs, got {out_features}")
        if bias is not None:
            check_tensor("bias", bias, (num_experts, out_features), dtype)
        self.dtype, self.in_features, self.num_experts = dtype, weight.in_features, num_experts
        self.columns = out_features if gate.kind == "none" else out_features // 2
        self.isa = isa or isa_name()
        self._kept = weight, bias
        self.native = _native.RoutedLinear(
            dtype_code(dtype),
            weight.in_features,
            num_experts,
            weight.out_features,
            FORMAT_CODES[weight.format],
            weight.codes.data_ptr(),
            weight.scales.data_ptr(),
            0 if weight.minimums is None else weight.minimums.data_ptr(),
            0 if weight.table is None else weight.table.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            GATES[gate.kind],
            gate.alpha,
            gate.limit,
        )

    def __call__(self, pool: WorkerPool, x: Tensor, experts: Tensor) -> Tensor:
        """Each row of x through its experts: [n, k, columns], zero for an expert that is none.

        Args:
            x: [n, in_features].
            experts: int64 [n, k]; num_experts or more stands for none.
        """
        check_tensor("x", x, (len(x), self.in_features), self.dtype)
        check_tensor("experts", experts, (len(x), experts.shape[-1]), torch.int64)
        out = torch.zeros(*experts.shape, self.columns, dtype=self.dtype)
        self.native.run(
            pool.native,
            self.isa,
            x.data_ptr(),
            len(x),
            experts.shape[1],
            experts.data_ptr(),
            out.data_ptr(),
        )
        return out


def run_experts(
    pool: WorkerPool,
    up: RoutedLinear,
    down: RoutedLinear,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
) -> Tensor:
    """The sum of weights[:, j] * down(up(x)) of the experts [:, j]: [n, down.columns].

    Args:
        x: [n, up.in_features].
        experts: int64 [n, k]; num_experts or more stands for none.
        weights: float32 [n, k].
    """
    fits = (down.in_features, down.num_experts, down.dtype, down.isa)
    if fits != (up.columns, up.num_experts, up.dtype, up.isa):
        raise ValueError(f"down must take {up.columns} features of up's experts, got {fits}")
    num_tokens, per_token = experts.shape
    check_tensor("x", x, (num_tokens, up.in_features), up.dtype)
    check_tensor("experts", experts, (num_tokens, per_token), torch.int64)
    check_tensor("weights", weights, (num_tokens, per_token), torch.float32)
    out = torch.empty(num_tokens, down.columns, dtype=up.dtype)
    step = max(1, _PAIRS // max(1, per_token))
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        _native.run_experts(
            up.native,
            down.native,
            pool.native,
            up.isa,
            x[part].data_ptr(),
            min(step, num_tokens - first),
            experts[part].data_ptr(),
            weights[part].data_ptr(),
            per_token,
            out[part].data_ptr(),
        )
    return out
