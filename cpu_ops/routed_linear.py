"""Matrices of experts: tokens meet those that they are routed to, in one native call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.linear import Linear, check_packed
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

    Where the weight is packed, up to 16 rows of an expert are rounded to int8 in groups of 32, as
    `PackedLinear` does; more meet weights that are unpacked tile by tile.

    Args:
        weight: packed [num_experts * out_features, in_features], one expert after the other; or
            a tensor [num_experts, out_features, in_features] of the dtype. Kept.
        dtype: of x, outputs and the bias.
        bias: [num_experts, out_features] or None.
        gate: of the outputs.
        isa: an ISA other than the process's (tests).
    """

    def __init__(
        self,
        weight: PackedWeight | Tensor,
        dtype: torch.dtype,
        num_experts: int,
        bias: Tensor | None = None,
        *,
        gate: Gate | None = None,
        isa: str | None = None,
    ) -> None:
        gate = gate or Gate()
        if isinstance(weight, Tensor):
            check_tensor("weight", weight, (num_experts, *weight.shape[-2:]), dtype)
            num_rows, in_features = weight.shape[:-1].numel(), int(weight.shape[-1])
            codes, code = weight.data_ptr(), 0
            scales = minimums = table = None
        else:
            num_rows, in_features = weight.out_features, weight.in_features
            check_packed("weight", weight, in_features)
            codes, code = weight.codes.data_ptr(), FORMAT_CODES[weight.format]
            scales, minimums, table = weight.scales, weight.minimums, weight.table
        if num_experts < 1 or num_rows % num_experts:
            raise ValueError(
                f"num_experts must divide the {num_rows} rows of the weight, got {num_experts}"
            )
        if gate.kind not in GATES:
            raise ValueError(f"unknown gate {gate.kind!r}; available: {', '.join(GATES)}")
        out_features = num_rows // num_experts
        if gate.kind != "none" and out_features % 2:
            raise ValueError(f"a gate needs an even number of outputs, got {out_features}")
        if bias is not None:
            check_tensor("bias", bias, (num_experts, out_features), dtype)
        self.dtype, self.in_features, self.num_experts = dtype, in_features, num_experts
        self.columns = out_features if gate.kind == "none" else out_features // 2
        self.isa = isa or isa_name()
        self._kept = weight, bias
        self.native = _native.RoutedLinear(
            dtype_code(dtype),
            in_features,
            num_experts,
            num_rows,
            code,
            codes,
            0 if scales is None else scales.data_ptr(),
            0 if minimums is None else minimums.data_ptr(),
            0 if table is None else table.data_ptr(),
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
    _check_fit(up, down)
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


@dataclass(frozen=True)
class ExpertChoice:
    """Which experts a token meets: those of the highest probabilities, a softmax of the router's
    outputs in float32; of equals the first.

    Attributes:
        normalises: probabilities are divided by the sum of the chosen ones.
        rounds: they are rounded to the dtype.
    """

    per_token: int
    normalises: bool
    rounds: bool

    def __call__(self, logits: Tensor, *, isa: str | None = None) -> tuple[Tensor, Tensor]:
        """logits [n, num_experts] -> experts, int64 [n, per_token], and weights, float32 likewise.

        A token without finite probabilities has weights that are NaN.
        """
        num_tokens, num_experts = logits.shape
        self.check(num_experts)
        check_tensor("logits", logits, (num_tokens, num_experts), logits.dtype)
        experts = torch.empty(num_tokens, self.per_token, dtype=torch.int64)
        weights = torch.empty(num_tokens, self.per_token, dtype=torch.float32)
        _native.choose_experts(
            isa or isa_name(),
            dtype_code(logits.dtype),
            logits.data_ptr(),
            num_tokens,
            num_experts,
            self.per_token,
            self.normalises,
            self.rounds,
            experts.data_ptr(),
            weights.data_ptr(),
        )
        return experts, weights

    def check(self, num_experts: int) -> None:
        """ValueError unless there are as many experts as a token meets."""
        if not 1 <= self.per_token <= num_experts:
            raise ValueError(
                f"experts per token must be in 1..{num_experts}, of which there are, got "
                f"{self.per_token}"
            )


class RoutedMlp:
    """The MLP of a layer of `DecoderLayers`: experts, and the router that chooses them.

    Args:
        router: hidden_size -> num_experts.
        up: hidden_size -> an expert's intermediate_size, with its gate.
        down: back to hidden_size.
    """

    def __init__(
        self, router: Linear, up: RoutedLinear, down: RoutedLinear, choice: ExpertChoice
    ) -> None:
        _check_fit(up, down)
        got = (router.in_features, router.out_features, router.dtype, down.columns)
        if got != (up.in_features, up.num_experts, up.dtype, up.in_features):
            raise ValueError(
                f"router and experts must take {up.in_features} features in {up.dtype}, the router "
                f"to {up.num_experts} experts and they to as many features, got {got}"
            )
        choice.check(up.num_experts)
        self.router, self.up, self.down, self.choice = router, up, down, choice
        self.native = _native.RoutedMlp(
            router.native,
            up.native,
            down.native,
            choice.per_token,
            choice.normalises,
            choice.rounds,
        )


def _check_fit(up: RoutedLinear, down: RoutedLinear) -> None:
    fits = (down.in_features, down.num_experts, down.dtype, down.isa)
    if fits != (up.columns, up.num_experts, up.dtype, up.isa):
        raise ValueError(f"down must take {up.columns} features of up's experts, got {fits}")
