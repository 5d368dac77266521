"""Linear layers: a few rows of a step through weights that are read once, or a prompt's many.

For many rows there are kernels where torch has none that are as fast: on an AVX2 CPU its products
of bfloat16 take six times as long as those of float32, and of float16 longer still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import MAX_LINEAR_ROWS, check_tensor, dtype_code, isa_name
from cpu_ops.packed import FORMAT_CODES, GROUP, PackedWeight
from cpu_ops.worker_pool import WorkerPool


def has_products(dtype: torch.dtype, *, isa: str | None = None) -> bool:
    """Whether a `Linear` takes any number of rows on this CPU, and no slower than torch.

    float32 is left to torch where its MKL knows the CPU: it is 6 % faster there (AVX2 on a Xeon),
    and makes half of what an AMD's units can do.
    """
    has_kernel = _native.has_products(isa or isa_name(), dtype_code(dtype))
    return has_kernel and not (dtype is torch.float32 and _native.IS_INTEL)


def _one_each(weights: Sequence[object], biases: Sequence[Tensor | None] | None) -> list[Any]:
    """A bias or None for each weight."""
    if not weights:
        raise ValueError("weights must not be empty")
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"expected {len(weights)} biases, got {len(biases)}")
    return [None] * len(weights) if biases is None else list(biases)


GATES = ("", "silu", "gelu_tanh")  # Gate of cpp/operators/linear.h


class Linear:
    """y = f(x) @ concat(weights).T + concat(biases) (+ residual), for up to `max_rows` rows of x,
    or any number where `has_products`.

    f is RMSNorm (`norm`), SwiGLU (`silu_mul`) or nothing. Values are rounded to the dtype where
    transformers rounds: after the norm, the gate, the product, the projection and the sum.

    Args:
        weights: matrices [out_i, in] of one dtype, contiguous; kept by reference, not copied.
        biases: one [out_i] or None per weight.
        isa: an ISA other than the process's (tests).
    """

    max_rows = MAX_LINEAR_ROWS

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        *,
        isa: str | None = None,
    ) -> None:
        biases = _one_each(weights, biases)
        self.dtype = weights[0].dtype
        self.in_features = int(weights[0].shape[-1])
        code = dtype_code(self.dtype)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            check_tensor(f"weights[{i}]", weight, (len(weight), self.in_features), self.dtype)
            if bias is not None:
                check_tensor(f"biases[{i}]", bias, (len(weight),), self.dtype)
        self.isa = isa or isa_name()
        self.takes_many_rows = _native.has_products(self.isa, code)
        self._kept: object = (list(weights), biases)
        sizes = [int(weight.shape[0]) for weight in weights]
        self.out_features = sum(sizes)
        self.native = _native.Linear(
            code,
            self.in_features,
            [weight.data_ptr() for weight in weights],
            [0 if bias is None else bias.data_ptr() for bias in biases],
            sizes,
        )

    def __call__(
        self,
        pool: WorkerPool,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        silu_mul: bool = False,
        gelu_mul: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Run on x [n, in_features], or [n, 2 * in_features] = gate ++ up with `silu_mul` or
        `gelu_mul`, which is GELU by tanh.

        Args:
            out: [n, out_features], made if None; may be `residual` itself.
            norm: (weight [in_features], eps) of an RMSNorm applied to x first.
            residual: [n, out_features], added last.
        """
        num_rows = x.shape[0]
        if num_rows < 1 or (num_rows > self.max_rows and not self.takes_many_rows):
            most = "1 row or more" if self.takes_many_rows else f"1 to {self.max_rows} rows"
            raise ValueError(f"x must have {most}, got {num_rows}")
        gate = GATES.index("silu" if silu_mul else "gelu_tanh" if gelu_mul else "")
        in_features = self.in_features * (2 if gate else 1)
        check_tensor("x", x, (num_rows, in_features), self.dtype)
        norm_weight, norm_eps = 0, 0.0
        if norm is not None:
            if gate:
                raise ValueError("norm and silu_mul exclude each other")
            weight, norm_eps = norm
            check_tensor("norm weight", weight, (self.in_features,), self.dtype)
            norm_weight = weight.data_ptr()
        if out is None:
            out = torch.empty(num_rows, self.out_features, dtype=self.dtype)
        for name, y in (("out", out), ("residual", residual)):
            if y is not None:
                check_tensor(name, y, (num_rows, self.out_features), self.dtype)
        self.native.run(
            pool.native,
            self.isa,
            x.data_ptr(),
            num_rows,
            norm_weight,
            norm_eps,
            gate,
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out


class PackedLinear(Linear):
    """A `Linear` of packed weights.

    Up to `max_rows` rows of f(x) are rounded to int8 in groups of 32, each with a float32 scale of
    its own, and multiplied as whole numbers; groups are summed in float32. A group of x with NaN or
    infinity makes its row NaN. Of more rows nothing is rounded: weights are unpacked tile by tile.

    Args:
        weights: of one in_features; the format of each is its own. Kept, not copied.
        dtype: of x, y and the biases.
        biases, isa: as of `Linear`.
    """

    def __init__(
        self,
        weights: Sequence[PackedWeight],
        dtype: torch.dtype,
        biases: Sequence[Tensor | None] | None = None,
        *,
        isa: str | None = None,
    ) -> None:
        biases = _one_each(weights, biases)
        self.dtype = dtype
        self.in_features = weights[0].in_features
        code = dtype_code(dtype)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            check_packed(f"weights[{i}]", weight, self.in_features)
            if bias is not None:
                check_tensor(f"biases[{i}]", bias, (weight.out_features,), dtype)
        self.isa = isa or isa_name()
        self.takes_many_rows = _native.has_products(self.isa, code)
        self._kept = (list(weights), biases)
        sizes = [weight.out_features for weight in weights]
        self.out_features = sum(sizes)
        self.native = _native.Linear(
            code,
            self.in_features,
            [FORMAT_CODES[weight.format] for weight in weights],
            [weight.codes.data_ptr() for weight in weights],
            [weight.scales.data_ptr() for weight in weights],
            [0 if w.minimums is None else w.minimums.data_ptr() for w in weights],
            [0 if w.table is None else w.table.data_ptr() for w in weights],
            [0 if bias is None else bias.data_ptr() for bias in biases],
            sizes,
        )

    def unpack(self, pool: WorkerPool, out: Tensor, first: int = 0) -> Tensor:
        """Rows of concat(weights) from `first` on, as many as out [n, in_features] has."""
        last = first + len(out)
        if not 0 <= first <= last <= self.out_features:
            raise ValueError(
                f"rows {first} to {last} are not among the {self.out_features} of the weights"
            )
        check_tensor("out", out, (len(out), self.in_features), self.dtype)
        self.native.unpack(pool.native, self.isa, first, last, out.data_ptr())
        return out


def check_packed(name: str, weight: PackedWeight, in_features: int) -> None:
    """ValueError unless its parts are what the kernels read."""
    if weight.in_features != in_features:
        raise ValueError(f"{name} must have {in_features} inputs, got {weight.in_features}")
    shape = (weight.out_features, -(-in_features // GROUP))
    dtype = torch.int8 if weight.codes.dtype == torch.int8 else torch.uint8
    width = GROUP if dtype == torch.int8 else GROUP // 2
    check_tensor(f"{name}.codes", weight.codes, (*shape, width), dtype)
    format = weight.format
    if format not in FORMAT_CODES:
        raise ValueError(f"{name} has no format: {format!r}; available: {', '.join(FORMAT_CODES)}")
    each = 2 if format.endswith("x16") else 1
    check_tensor(f"{name}.scales", weight.scales, (shape[0], each * shape[1]), torch.float16)
    if weight.minimums is not None:
        check_tensor(f"{name}.minimums", weight.minimums, shape, torch.float16)
    if weight.table is not None:
        check_tensor(f"{name}.table", weight.table, (16,), torch.int8)
