"""A linear layer of packed weights (`cpu_ops.packed`) on a GPU.

A few rows are whole numbers alone: they are quantised in groups of 32, as the weights are, and
`dp4a` multiplies four of them at a time; scales meet the sums of groups. That reads 5 or 8.5 bits
a weight. Several rows meet on tensor cores (`packed_rows`), 16 at a time. Many meet weights that
are unpacked, a block of outputs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from gpu_ops.checks import check_dtype, check_gate, check_tensor
from gpu_ops.gemv import glu
from gpu_ops.launch import interprets, jit, next_power_of_2, runs_kernel, tl
from gpu_ops.linear import GpuLinear
from gpu_ops.packed_rows import MOST_ROWS, UNROLLED, few_rows, has_tensor_cores
from gpu_ops.rms_norm import rms_norm_reference
from gpu_ops.silu_mul import gate_reference

GROUP = 32  # weights with a scale of their own
GPU_FORMATS = ("q8", "q4", "q8m", "q8x16")  # of `cpu_ops.packed`
_PER_PROGRAM = 1024  # elements of a row that is unpacked
_GROUPS_PER_PROGRAM = 32  # of a row that is quantised
_MOST_ROWS = 8  # that meet packed weights without tensor cores; more are worth unpacking
_MOST_ON_TENSOR_CORES = 2 * MOST_ROWS  # two products; three are not ahead of cuBLAS
_BLOCK_BYTES = 128 * 2**20  # of weights that are unpacked at one time


@jit
def quantise_rows_kernel(
    x: tl.tensor,
    norm_weight: tl.tensor,  # None: no norm
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,  # of scales and sums; so with the next
    GROUP_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_X: tl.constexpr,
) -> None:
    """One program per GROUPS groups of a row; those behind its end are zeros."""
    dtype = x.dtype.element_ty
    r = tl.program_id(1).to(tl.int64)
    inverse = 1.0
    if norm_weight is not None:
        d = tl.arange(0, BLOCK_X)
        whole = tl.load(x + r * K + d, mask=d < K, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    row = tl.load(x + r * K + k, mask=k < K, other=0.0).to(tl.float32)
    if norm_weight is not None:
        w = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        row = ((row * inverse).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    largest = tl.max(tl.abs(row), 1)
    scaled = row * (127.0 / tl.maximum(largest, 1e-30))[:, None]
    whole_numbers = (scaled + tl.where(scaled < 0, -0.5, 0.5)).to(tl.int32).to(tl.int8)
    inside = group < NUM_GROUPS
    tl.store(codes + r * NUM_GROUPS * 32 + k, whole_numbers, mask=inside[:, None])
    # NaN and infinity stay what they are in the scale, and so in each output.
    bad = tl.sum(row * 0.0, 1)
    at = r * ROW_STRIDE + group * GROUP_STRIDE
    tl.store(scales + at, largest * (1.0 / 127.0) + bad, mask=inside)
    tl.store(sums + at, tl.sum(row, 1), mask=inside)


@jit
def _dot4(a: tl.tensor, b: tl.tensor, c: tl.tensor, DP4A: tl.constexpr) -> tl.tensor:
    """c + the products of the four signed bytes of a and b."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1
        )
    for byte in tl.static_range(4):
        c += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return c


@jit
def packed_products(
    weight_codes: tl.tensor,
    weight_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    n: tl.tensor,
    inside_n: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    DP4A: tl.constexpr,
) -> tl.tensor:
    """Products of rows n [BLOCK_N] of the weights and one row: float32 [BLOCK_N]."""
    IN_HALVES: tl.constexpr = FORMAT == "q4" or FORMAT == "q8x16"
    WORDS: tl.constexpr = 4 if IN_HALVES else 8  # of four bytes, of a half or a group
    GROUP_WORDS: tl.constexpr = 4 if FORMAT == "q4" else 8
    shape: tl.constexpr = (BLOCK_N, GROUPS, WORDS)
    word = tl.arange(0, WORDS)[None, None, :]
    totals = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    zero = tl.zeros(shape, tl.int32)
    for start in range(0, NUM_GROUPS, GROUPS):
        g = start + tl.arange(0, GROUPS)
        inside_g = g < NUM_GROUPS
        inside = inside_n[:, None] & inside_g[None, :]
        of_group = n[:, None] * NUM_GROUPS + g[None, :]
        at = weight_codes + of_group[:, :, None] * GROUP_WORDS + word
        w = tl.load(at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
        x = codes + g[None, :, None] * 8 + word
        low = tl.broadcast_to(tl.load(x, mask=inside_g[None, :, None], other=0), shape)
        scale = tl.load(scales + g, mask=inside_g, other=0.0)[None, :]
        numbers = tl.load(weight_scales + of_group, mask=inside, other=0)
        if FORMAT == "q8":
            of_weight = numbers.to(tl.float32)
        else:  # two float16: scale and minimum, or a scale of each half
            of_weight = (numbers & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            other = (numbers >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if IN_HALVES:
            high = tl.broadcast_to(tl.load(x + 4, mask=inside_g[None, :, None], other=0), shape)
        if FORMAT == "q4":
            dots = _dot4(w & 0x0F0F0F0F, low, zero, DP4A)
            dots = _dot4((w >> 4) & 0x0F0F0F0F, high, dots, DP4A)
        else:
            dots = _dot4(w, low, zero, DP4A)
        if FORMAT == "q8x16":
            w = tl.load(at + 4, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
            of_high = tl.sum(_dot4(w, high, zero, DP4A), 2)
            totals += of_high.to(tl.float32) * (other * scale)
        elif FORMAT != "q8":
            totals += other * tl.load(sums + g, mask=inside_g, other=0.0)[None, :]
        totals += tl.sum(dots, 2).to(tl.float32) * (of_weight * scale)
    return tl.sum(totals, 1)


@jit
def packed_product_kernel(
    weight_codes: tl.tensor,
    weight_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,  # None: there is none; so with the next
    residual: tl.tensor,
    out: tl.tensor,
    num_out: tl.tensor,
    stride: tl.tensor,
    num_rows: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    GLU: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    DP4A: tl.constexpr,
) -> None:
    """One program per row, `stride` elements apart in `out`, and BLOCK_N outputs; with GLU rows
    i, i + num_out of the weights are gate and up of output i.

    Neighbouring programs are of different rows: weights come from the cache for all but one.
    """
    dtype = out.dtype.element_ty
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    n = (tl.program_id(0) // num_rows).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < num_out
    codes += row * NUM_GROUPS * 8
    scales += row * NUM_GROUPS
    sums += row * NUM_GROUPS
    y = packed_products(
        weight_codes, weight_scales, codes, scales, sums, n, inside_n,
        NUM_GROUPS, FORMAT, BLOCK_N, GROUPS, DP4A,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)
    if GLU:
        up = packed_products(
            weight_codes, weight_scales, codes, scales, sums, n + num_out, inside_n,
            NUM_GROUPS, FORMAT, BLOCK_N, GROUPS, DP4A,
        )  # fmt: skip
        if bias is not None:
            up += tl.load(bias + num_out + n, mask=inside_n, other=0.0).to(tl.float32)
        y = glu(y, up, GELU, dtype)
    else:
        y = y.to(dtype)
    at = row * stride + n
    if residual is not None:
        added = tl.load(residual + at, mask=inside_n, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + added).to(dtype)
    tl.store(out + at, y, mask=inside_n)


@jit
def unpack_kernel(
    weight_codes: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program per row and BLOCK_K elements of it."""
    dtype = out.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < K
    group = n * NUM_GROUPS + k // 32
    if FORMAT == "q4":
        byte = tl.load(weight_codes + group * 16 + k % 16, mask=inside, other=0)
        code = (tl.where(k % 32 < 16, byte, byte >> 4) & 15).to(tl.float32)
    else:
        code = tl.load(weight_codes + group * 32 + k % 32, mask=inside, other=0).to(tl.float32)
    numbers = tl.load(weight_scales + group, mask=inside, other=0)
    if FORMAT == "q8":
        value = code * numbers.to(tl.float32)
    else:
        scale = (numbers & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        other = (numbers >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if FORMAT == "q8x16":
            value = code * tl.where(k % 32 < 16, scale, other)
        else:
            value = code * scale + other
    tl.store(out + n * K + k, value.to(dtype), mask=inside)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Neighbouring outputs of one format, as the kernels read them.

    Attributes:
        format: one of `GPU_FORMATS`.
        codes: as `cpu_ops.packed.PackedWeight` has them: int8 [num_out, num_groups, 32], of q4
            uint8 [num_out, num_groups, 16].
        numbers: float16 [num_out, num_groups, 1 or 2], contiguous: a group's scale; its scale and
            minimum (q4, q8m); or a scale of each half (q8x16).
        in_features: of which the last group may lack some.
    """

    format: str
    codes: Tensor
    numbers: Tensor
    in_features: int

    @classmethod
    def of(
        cls,
        format: str,
        codes: Tensor,
        scales: Tensor,
        minimums: Tensor | None,
        in_features: int,
    ) -> PackedRows:
        """Those of a `PackedWeight`'s attributes; scales and minimums are copied, if there are
        both."""
        shape = *codes.shape[:2], -1
        numbers = scales.view(shape) if minimums is None else torch.stack([scales, minimums], -1)
        return cls(format, codes, numbers, in_features)

    @classmethod
    def over(
        cls,
        format: str,
        codes: Tensor,
        scales: Tensor,
        minimums: Tensor | None,
        in_features: int,
    ) -> PackedRows | None:
        """The same over the memory of some outputs that `of` has made; None: it has not."""
        num_out, num_groups = codes.shape[:2]
        if minimums is None:
            per_group = scales.shape[1] // num_groups
            follows = scales.is_contiguous()
        else:
            per_group = 2
            follows = scales.stride() == (2 * num_groups, 2)
            follows &= minimums.data_ptr() - scales.data_ptr() == scales.itemsize
        if not follows or not codes.is_contiguous():
            return None
        strides = num_groups * per_group, per_group, 1
        numbers = scales.as_strided((num_out, num_groups, per_group), strides)
        return cls(format, codes, numbers, in_features)

    def to(self, device: torch.device) -> PackedRows:
        """The same there; nothing is copied where they are there already."""
        codes, numbers = (x.to(device, non_blocking=True) for x in (self.codes, self.numbers))
        return replace(self, codes=codes, numbers=numbers)

    @property
    def num_out(self) -> int:
        return int(self.numbers.shape[0])

    @property
    def num_groups(self) -> int:
        return int(self.numbers.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.numbers.nbytes

    @property
    def words(self) -> Tensor:
        """Codes, four in an int32."""
        return self.codes.view(torch.int32)

    @property
    def scales(self) -> Tensor:
        """[num_out, num_groups, 1]: float16, or a group's two numbers in an int32."""
        return self.numbers if self.format == "q8" else self.numbers.view(torch.int32)

    @property
    def scales_and_minimums(self) -> tuple[Tensor, Tensor | None]:
        """As a `PackedWeight` has them, over the same memory."""
        if self.format in ("q4", "q8m"):
            return self.numbers[..., 0], self.numbers[..., 1]
        return self.numbers.flatten(1), None

    def part(self, first: int, last: int) -> PackedRows:
        """Some of the outputs, over the same memory."""
        codes, numbers = self.codes[first:last], self.numbers[first:last]
        return PackedRows(self.format, codes, numbers, self.in_features)

    def dequantise(self) -> Tensor:
        """float32 [num_out, in_features], by torch."""
        codes, (scales, minimums) = self.codes, self.scales_and_minimums
        if self.format == "q4":
            codes = torch.cat([codes & 15, codes >> 4], -1)
        values = (codes.float().view(*scales.shape, -1) * scales.float()[..., None]).view_as(codes)
        if minimums is not None:
            values += minimums.float()[..., None]
        return values.flatten(1)[:, : self.in_features]


class GpuPackedLinear(GpuLinear):
    """A `GpuLinear` of packed weights.

    Args:
        parts: outputs one after the other.
        dtype: of x and out.
        bias: [out_features] in `dtype`.
    """

    def __init__(
        self, parts: Sequence[PackedRows], dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self._parts = tuple(parts)
        self._bias = bias
        self.out_features = sum(part.num_out for part in self._parts)
        self.in_features = parts[0].in_features
        self.dtype, self.device = dtype, parts[0].codes.device

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def reads(self, codes: Tensor) -> bool:
        """Whether these are its first ones."""
        return self._parts[0].codes.data_ptr() == codes.data_ptr()

    def first(self, out_features: int) -> GpuPackedLinear:
        parts, left = [], out_features
        for part in self._parts:
            if left > 0:
                parts.append(part.part(0, left))
                left -= part.num_out
        bias = None if self._bias is None else self._bias[:out_features]
        return GpuPackedLinear(parts, self.dtype, bias)

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
        if not _are_few(x) or (glu and len(self._parts) > 1):  # gate and up of two formats
            return super().__call__(x, out, norm=norm, glu=glu, gate=gate, residual=residual)
        check_dtype("x", x)
        check_tensor("x", x, (len(x), self.in_features), self.dtype, x.device)
        width = self.out_features // (2 if glu else 1)
        out = x.new_empty(len(x), width) if out is None else out
        check_tensor("out", out, (len(x), width), self.dtype, x.device)
        if residual is not None:
            check_tensor("residual", residual, out.shape, self.dtype, x.device)
        if len(x) > MOST_ROWS:
            half = len(x) // 2
            for few in (slice(half), slice(half, None)):
                summand = None if residual is None else residual[few]
                self(x[few], out[few], norm=norm, glu=glu, gate=gate, residual=summand)
            return out
        rows = quantise_rows(x, norm, most_rows=8 if len(x) <= 8 else MOST_ROWS)
        first = 0
        for part in self._parts:
            last = width if glu else first + part.num_out
            few_rows(
                part.format,
                part.codes,
                part.scales,
                rows,
                out[:, first:last],
                bias=None if self._bias is None else self._bias[first : first + part.num_out],
                residual=None if residual is None else residual[:, first:last],
                glu=glu,
                gate=gate,
            )
            first = last
        return out

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
        check_dtype("x", x)
        num_out, device = out.shape[-1], x.device
        check_tensor("x", x, (1, self.in_features), self.dtype, device)
        check_tensor("out", out, (1, num_out), out.dtype, device)
        for name, row in (("norm", None if norm is None else norm[0]), ("residual", residual)):
            if row is not None:
                shape = (self.in_features,) if name == "norm" else (1, num_out)
                check_tensor(name, row, shape, self.dtype, device)
        if glu and len(self._parts) > 1:  # gate and up are of different formats
            both = out.new_empty(1, self.out_features)
            self._row(x, both, norm, None, glu=False)
            gates, up = both.chunk(2, -1)
            y = gate_reference(gates, gate) * up
            out.copy_(y if residual is None else y + residual)
            return
        if not runs_kernel(x):
            out.copy_(self._row_reference(x, out.dtype, norm, residual, glu=glu, gate=gate))
            return
        self._multiply(x, out, norm, residual, glu=glu, gate=gate)

    def _rows(self, x: Tensor) -> Tensor:
        if _are_few(x):
            return self(x)
        if not runs_kernel(x) or len(x) > _MOST_ROWS:
            return self.many_rows(x)
        y = x.new_empty(len(x), self.out_features)
        self._multiply(x.contiguous(), y, None, None, glu=False)
        return y

    def _multiply(
        self,
        x: Tensor,
        out: Tensor,
        norm: tuple[Tensor, float] | None,
        residual: Tensor | None,
        *,
        glu: bool,
        gate: str = "silu",
    ) -> None:
        """Rows on the grid by the kernel."""
        is_gelu = check_gate(gate)
        codes, scales, sums = quantise_rows(x, norm)
        first = 0
        for part in self._parts:
            last = out.shape[1] if glu else first + part.num_out
            bias = None if self._bias is None else self._bias[first : first + part.num_out]
            block_n, groups, warps = launch_shape(part.num_groups, part.format)
            programs = len(x) * -(-(last - first) // block_n)  # in one dimension: there may be 2^17
            packed_product_kernel[(programs,)](
                part.words,
                part.scales,
                codes.view(torch.int32),
                scales,
                sums,
                bias,
                None if residual is None else residual[:, first:last],
                out[:, first:last],
                last - first,
                out.shape[1],
                len(x),
                part.num_groups,
                part.format,
                glu,
                is_gelu,
                block_n,
                groups,
                not interprets(),
                num_warps=warps,
            )
            first = last

    def many_rows(self, x: Tensor) -> Tensor:
        """x [n, in_features] -> [n, out_features], with gradients of x."""
        y, first = [], 0
        step = max(1, _BLOCK_BYTES // (self.in_features * self.dtype.itemsize))
        for part in self._parts:
            for start in range(0, part.num_out, step):
                stop = min(start + step, part.num_out)
                bias = None if self._bias is None else self._bias[first + start : first + stop]
                y.append(functional.linear(x, unpack(part.part(start, stop), self.dtype), bias))
            first += part.num_out
        return y[0] if len(y) == 1 else torch.cat(y, -1)

    def _row_reference(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        norm: tuple[Tensor, float] | None,
        residual: Tensor | None,
        *,
        glu: bool,
        gate: str,
    ) -> Tensor:
        """The same with weights in float32."""
        if norm is not None:
            x = rms_norm_reference(x, *norm)
        weight = torch.cat([part.dequantise() for part in self._parts])
        bias = None if self._bias is None else self._bias.float()
        y = functional.linear(x.float(), weight, bias).to(out_dtype)
        if glu:
            gates, up = y.chunk(2, dim=-1)
            y = gate_reference(gates, gate) * up
        return y if residual is None else y + residual


def _are_few(x: Tensor) -> bool:
    """Whether tensor cores multiply these rows and packed weights."""
    return 1 < len(x) <= _MOST_ON_TENSOR_CORES and runs_kernel(x) and has_tensor_cores(x.device)


def launch_shape(num_groups: int, format: str) -> tuple[int, int, int]:
    """Outputs of a program, groups of each that it reads at a time, and its warps."""
    groups, warps = 32, 1
    if format == "q4":
        groups, warps = (64, 2) if num_groups > 256 else (128, 4)
    return 1, min(groups, next_power_of_2(num_groups)), warps


def quantise_rows(
    x: Tensor, norm: tuple[Tensor, float] | None = None, *, most_rows: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [n, k] on a grid of 255 points per group of 32, after an RMSNorm (weight [k], eps).

    Args:
        most_rows: as `few_rows` reads them: groups are rounded up to a multiple of UNROLLED, by
            zeros, and scales and sums are [num_groups, most_rows], of which n columns are set.

    Returns int8 codes [n, num_groups * 32], and of each group the scale and the sum of what was
    quantised, float32 [n, num_groups].
    """
    num_rows, num_in = x.shape
    num_groups = -(-num_in // GROUP)
    if most_rows is None:
        shape, strides = (num_rows, num_groups), (num_groups, 1)
    else:
        num_groups = -(-num_groups // UNROLLED) * UNROLLED
        shape, strides = (num_groups, most_rows), (1, most_rows)
    codes = x.new_empty(num_rows, num_groups * GROUP, dtype=torch.int8)
    scales, sums = x.new_empty(2, *shape, dtype=torch.float32)
    norm_weight, eps = (None, 0.0) if norm is None else norm
    groups = min(_GROUPS_PER_PROGRAM, next_power_of_2(num_groups))
    quantise_rows_kernel[(-(-num_groups // groups), num_rows)](
        x, norm_weight, codes, scales, sums, eps, num_in, num_groups, *strides, groups,
        next_power_of_2(num_in), num_warps=4,
    )  # fmt: skip
    return codes, scales, sums


def unpack(rows: PackedRows, dtype: torch.dtype) -> Tensor:
    """[num_out, in_features] in `dtype`."""
    if not runs_kernel(rows.codes):
        return rows.dequantise().to(dtype)
    out = torch.empty(rows.num_out, rows.in_features, dtype=dtype, device=rows.codes.device)
    unpack_kernel[(rows.num_out, -(-rows.in_features // _PER_PROGRAM))](
        rows.codes,
        rows.scales,
        out,
        rows.in_features,
        rows.num_groups,
        rows.format,
        _PER_PROGRAM,
        num_warps=4,
    )
    return out
