"""Weights of 8 or 4 bits in groups (`cpu_ops.packed`, `gpu_ops.packed_linear`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpu_ops.linear import Linear as CpuLinear
from cpu_ops.linear import PackedLinear as PackedCpuLinear
from cpu_ops.linear import has_products
from cpu_ops.packed import PackedWeight
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.packed_linear import GPU_FORMATS, GpuPackedLinear, PackedRows
from gpu_ops.packed_rows import MOST_ROWS
from offload.models.linear import Linear

_BLOCK_BYTES = 4 * 2**20  # of weights that are unpacked at one time: they stay in a CPU's cache
_ROWS = 64  # a task of unpacking

# What a GPU's kernels read, by the first of the modules and how many there are.
_on_gpu: WeakKeyDictionary[nn.Module, dict[int, GpuPackedLinear]] = WeakKeyDictionary()


class PackedMatrix(nn.Module):
    """Packed weights [out_features, in_features] as parameters, which do not learn: they are moved
    and counted.

    Scales and minimums are kept as int16, the bits of their float16: transformers takes the first
    floating-point parameter's dtype for the model's, and `.to(dtype)` would round them.

    Args:
        dtype: of what comes of them.
    """

    minimums: nn.Parameter | None
    table: nn.Parameter | None

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.keep(weight)

    def keep(self, weight: PackedWeight) -> None:
        """Have these weights from now on."""
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.codes = _fixed(weight.codes)
        self.scales = _fixed(weight.scales.view(torch.int16))
        minimums = weight.minimums
        self.minimums = None if minimums is None else _fixed(minimums.view(torch.int16))
        self.table = None if weight.table is None else _fixed(weight.table)

    def stock_name(self, path: str) -> str:
        """The name of the stock model's parameter; `path` is this module's."""
        return f"{path}.weight"

    def of_stock(self) -> Tensor:
        """Its value, dequantised."""
        return self.packed.dequantise(self.dtype)

    @property
    def packed(self) -> PackedWeight:
        """The weights where they are now."""
        scales, minimums = self.scales.detach().view(torch.float16), self.minimums
        return PackedWeight(
            self.codes.detach(),
            scales,
            None if minimums is None else minimums.detach().view(torch.float16),
            self.in_features,
            None if self.table is None else self.table.detach(),
        )


class PackedModule(PackedMatrix):
    """In the place of an `nn.Linear`.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        dtype: of inputs and outputs.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype)
        self.bias = None if bias is None else _fixed(bias)

    def forward(self, x: Tensor) -> Tensor:
        return PackedLinear([self])(x)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self.packed.format}"


class PackedLinear(Linear):
    """A `Linear` of `PackedModule`s of one dtype, each of a format of its own.

    A step's few rows go through integer products. Many rows meet weights in `dtype`, of which a few
    MiB exist at one time.
    """

    _modules: tuple[PackedModule, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self._modules[0].dtype

    @property
    def device(self) -> torch.device:
        return self._modules[0].codes.device

    def __call__(self, x: Tensor, pool: WorkerPool | None = None) -> Tensor:
        if pool is not None and self.prefers_cpu_ops(x):
            return self.on_cpu()(pool, x.contiguous())
        if x.is_cuda:
            flat, on_gpu = x.flatten(0, -2), self.on_gpu()
            is_whole = len(flat) > MOST_ROWS or (x.requires_grad and torch.is_grad_enabled())
            out = on_gpu.many_rows(flat) if is_whole else on_gpu(flat.contiguous())
            return out.view(*x.shape[:-1], self.out_features)
        y: list[Tensor] = []
        for module in self._modules:
            rows = max(_ROWS, _BLOCK_BYTES // (self.in_features * self.dtype.itemsize))
            kernels = PackedCpuLinear([module.packed], self.dtype)
            for first in range(0, module.out_features, rows):
                last = min(first + rows, module.out_features)
                if pool is None:
                    weight = module.packed.dequantise(self.dtype, first, last)
                else:
                    weight = torch.empty(last - first, self.in_features, dtype=self.dtype)
                    kernels.unpack(pool, weight, first)
                bias = None if module.bias is None else module.bias[first:last]
                y.append(F.linear(x, weight, bias))
        return y[0] if len(y) == 1 else torch.cat(y, dim=-1)

    def prefers_cpu_ops(self, x: Tensor) -> bool:
        return (
            x.is_cpu
            and len(x) > 0
            and (has_products(x.dtype) or len(x) <= PackedCpuLinear.max_rows)
        )

    def on_cpu(self) -> CpuLinear:
        return PackedCpuLinear(
            [module.packed for module in self._modules],
            self.dtype,
            [None if module.bias is None else module.bias.detach() for module in self._modules],
        )

    def on_gpu(self) -> GpuPackedLinear:
        """Kernels over the weights, of neighbours of one format in one piece, which the modules'
        parameters become parts of.

        Raises:
            NotImplementedError: a format that only the CPU's kernels read.
        """
        for module in self._modules:
            _check_gpu_format(module.packed)
        of_first = _on_gpu.setdefault(self._modules[0], {})
        known = of_first.get(len(self._modules))
        if known is not None and known.reads(self._modules[0].codes):
            return known
        parts = [
            _in_one_piece(list(same))
            for _, same in groupby(self._modules, key=lambda module: module.packed.format)
        ]
        bias = None
        if any(module.bias is not None for module in self._modules):
            bias = torch.cat([*self._biases()])
        made = GpuPackedLinear(parts, self.dtype, bias)
        for module in self._modules:  # what was made before keeps where their weights were
            of_module = _on_gpu.get(module, {})
            for count in [n for n, other in of_module.items() if not other.reads(module.codes)]:
                del of_module[count]
        of_first[len(self._modules)] = made
        return made

    def keep_rows(self, *rows: range) -> None:
        for module, kept in zip(self._modules, rows, strict=True):
            module.keep(module.packed.rows(torch.arange(kept.start, kept.stop)))
            if module.bias is not None:
                module.bias = _fixed(module.bias[kept.start : kept.stop].clone())

    def keep_columns(self, columns: range, *, keeps_bias: bool) -> None:
        for module in self._modules:
            module.keep(module.packed.columns(columns))
            if not keeps_bias:
                module.bias = None

    def dequantise(self) -> Tensor:
        return torch.cat([module.packed.dequantise(self.dtype) for module in self._modules])

    def _biases(self) -> Iterator[Tensor]:
        for module in self._modules:
            none = torch.zeros(module.out_features, dtype=self.dtype, device=self.device)
            yield none if module.bias is None else module.bias.detach()


def rows_on_gpu(matrix: PackedMatrix) -> PackedRows:
    """A matrix by itself as a GPU's kernels read it; its parameters become parts of that.

    Raises: as `PackedLinear.on_gpu`.
    """
    _check_gpu_format(matrix.packed)
    return _in_one_piece([matrix])


def _check_gpu_format(packed: PackedWeight) -> None:
    if packed.format not in GPU_FORMATS:
        raise NotImplementedError(
            f"weights kept as {packed.format} are multiplied on the CPU only; load the model with "
            'weights="q8", "q4" or a dtype for a GPU'
        )


def _in_one_piece(modules: Sequence[PackedMatrix]) -> PackedRows:
    """Their weights as a GPU's kernels read them.

    On a GPU the modules' parameters become parts of it; on a CPU, where kernels of the GPU are
    computed by references, they stay as the CPU's own read them.
    """
    packed = [module.packed for module in modules]
    if len(packed) == 1 and (known := PackedRows.over(*_attributes(packed[0]))) is not None:
        return known  # a part of what was made before
    minimums = [each.minimums for each in packed if each.minimums is not None]
    together = PackedWeight(
        torch.cat([each.codes for each in packed]) if len(packed) > 1 else packed[0].codes,
        torch.cat([each.scales for each in packed]),
        torch.cat(minimums) if minimums else None,
        packed[0].in_features,
    )
    rows = PackedRows.of(*_attributes(together))
    if rows.codes.is_cuda:
        _move_into(rows, modules)
    return rows


def _attributes(packed: PackedWeight) -> tuple[str, Tensor, Tensor, Tensor | None, int]:
    return packed.format, packed.codes, packed.scales, packed.minimums, packed.in_features


def _move_into(rows: PackedRows, modules: Sequence[PackedMatrix]) -> None:
    """The modules' parameters become parts of it."""
    first = 0
    for module in modules:
        part = rows.part(first, first + module.out_features)
        scales, minimums = part.scales_and_minimums
        module.codes.data = part.codes
        module.scales.data = scales.view(torch.int16)
        if module.minimums is not None and minimums is not None:
            module.minimums.data = minimums.view(torch.int16)
        first += module.out_features


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach(), requires_grad=False)
