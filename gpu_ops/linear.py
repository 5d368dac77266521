"""A linear layer of a few rows, with what comes before and after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpu_ops.gemv import gemv
from gpu_ops.rms_norm import add_rms_norm
from gpu_ops.silu_mul import silu_mul


class GpuLinear:
    """out = g(f(x) @ weight.T + bias) + residual, as `gemv`, for any number of rows.

    One row is one kernel. More rows are a matrix product, and one kernel each for f, g and the sum.

    Args:
        weight: [out_features, in_features], kept by reference; bias: [out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self._weight.nbytes

    def first(self, out_features: int) -> GpuLinear:
        """The first outputs alone, over the same memory."""
        bias = None if self._bias is None else self._bias[:out_features]
        return GpuLinear(self._weight[:out_features], bias)

    def __call__(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        glu: bool = False,
        gate: str = "silu",
        residual: Tensor | None = None,
    ) -> Tensor:
        """Run on x [n, in_features].

        Args:
            out: [n, out_features], half as wide with `glu`, made if None; may be `residual` itself.
                Of one row without norm, `glu` and residual it may be float32, not rounded.
            norm: (weight [in_features], eps) of an RMSNorm of x.
            glu: a gate's activation times the others, of the outputs; the gate's come first.
            gate: the activation, "silu" or "gelu_tanh".
            residual: added last.
        """
        if len(x) == 1:
            if out is None:
                out = x.new_empty(1, self.out_features // (2 if glu else 1))
            self._row(x, out, norm, residual, glu=glu, gate=gate)
            return out
        if norm is not None:
            given, x = x, torch.empty_like(x)
            add_rms_norm(given, None, *norm, x)
        y = self._rows(x)
        if glu:
            into = out if residual is None else None  # which may be `out`
            gated = y.new_empty(len(y), y.shape[1] // 2) if into is None else into
            silu_mul(y, gated, gate)
            y = gated
        if residual is not None:
            return torch.add(y, residual, out=out)
        return y if out is None or out is y else out.copy_(y)

    def _row(
        self,
        x: Tensor,
        out: Tensor,
        norm: tuple[Tensor, float] | None,
        residual: Tensor | None,
        *,
        glu: bool,
        gate: str = "silu",
    ) -> None:
        """One row, with all that is fused into it."""
        gemv(
            x,
            self._weight,
            out,
            bias=self._bias,
            norm=norm,
            glu=glu,
            gate=gate,
            residual=residual,
        )

    def _rows(self, x: Tensor) -> Tensor:
        """Several rows: the product and the bias alone."""
        return functional.linear(x, self._weight, self._bias)
