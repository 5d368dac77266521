"""Packed weights: whole numbers of 8 or 4 bits in groups of 32, with a scale to each group.

Groups lie along the input. An element is scale * code, of `q8`, an int8; or scale * code + minimum,
of `q4`, a code of 0 to 15 (Q4_1's grid in GGUF files). Files have weights on other grids, too, to
which nothing is rounded: `q8m` is q8 with minimums, `t4` has scale * table[code] with 16 numbers in
the table, and `q8x16` and `t4x16` have a scale to each half of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_ops import _native

GROUP = _native.PACKED_GROUP
FORMATS = ("q8", "q4")
# WeightFormat of cpp/kernels/kernels.h: all that there are.
FORMAT_CODES = {"q8": 1, "q4": 2, "q8x16": 3, "q8m": 4, "t4": 5, "t4x16": 6}
GROUP_BYTES = {  # codes, scales and minimum
    "q8": GROUP + 2,
    "q8x16": GROUP + 4,
    "q8m": GROUP + 4,
    "q4": GROUP // 2 + 4,
    "t4": GROUP // 2 + 2,
    "t4x16": GROUP // 2 + 4,
}
TABLE_BYTES = {format: 16 if format.startswith("t4") else 0 for format in FORMAT_CODES}
_ROWS = 2**22  # elements that are quantised at a time: their float32 copies are a few times 16 MiB


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [out_features, in_features]; the last group of a row is padded with zero codes.

    Attributes:
        codes: of 8 bits int8 [out_features, num_groups, 32]; of 4 uint8 [out_features, num_groups,
            16], the first half of a group in the low halves of its bytes, the second in the high
            ones.
        scales: float16 [out_features, num_groups], or twice as many where each half of a group has
            one.
        minimums: float16 [out_features, num_groups] of q4 and q8m, else None.
        table: int8 [16] of t4 and t4x16, else None.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    in_features: int
    table: Tensor | None = None

    @property
    def format(self) -> str:
        """One of `FORMAT_CODES`."""
        if self.codes.dtype == torch.int8:
            format = "q8" if self.minimums is None else "q8m"
        else:
            format = "t4" if self.minimums is None else "q4"
        return format if self.scales.shape[1] <= self.codes.shape[1] else f"{format}x16"

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    def dequantise(
        self, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None
    ) -> Tensor:
        """The rows from `first` to before `last`, in `dtype`."""
        part = slice(first, last)
        codes, scales = self.codes[part], self.scales[part].float()
        if codes.dtype == torch.uint8:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        values = (codes if self.table is None else self.table[codes.int()]).float()
        of_scale = values.view(*scales.shape, -1)  # elements that share one
        of_scale *= scales.unsqueeze(-1)
        if self.minimums is not None:
            values += self.minimums[part].float().unsqueeze(-1)
        return values.flatten(1)[:, : self.in_features].to(dtype)

    def rows(self, which: Tensor | slice) -> PackedWeight:
        """Some of its rows, by their numbers (int64 [n]) or a slice."""

        def of(values: Tensor) -> Tensor:
            return values[which] if isinstance(which, slice) else values.index_select(0, which)

        minimums = None if self.minimums is None else of(self.minimums)
        return PackedWeight(of(self.codes), of(self.scales), minimums, self.in_features, self.table)

    def columns(self, which: range) -> PackedWeight:
        """A copy of some of its inputs.

        Raises:
            ValueError: they do not begin and end between groups.
        """
        if which.start % GROUP or (which.stop % GROUP and which.stop != self.in_features):
            raise ValueError(
                f"inputs {which.start} to {which.stop} of packed weights: groups of {GROUP} "
                "cannot be cut"
            )
        groups = slice(which.start // GROUP, -(-which.stop // GROUP))

        def of(values: Tensor) -> Tensor:
            each = values.view(len(values), self.codes.shape[1], -1)
            return each[:, groups].flatten(1).clone()

        codes = self.codes[:, groups].clone()
        minimums = None if self.minimums is None else of(self.minimums)
        return PackedWeight(codes, of(self.scales), minimums, len(which), self.table)


def quantise(weight: Tensor, format: str) -> PackedWeight:
    """A matrix on the nearest points of a grid per group.

    q8 has 127 steps on each side of 0, as far as the largest number; q4 has 15 from the smallest to
    the largest. Scales and minimums are rounded to float16 first, and codes chosen for those.
    Groups with NaN or infinity, or numbers that float16 cannot scale, give such outputs, too.

    Args:
        weight: [out_features, in_features], bfloat16, float16 or float32.
        format: one of `FORMATS`.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; available: {', '.join(FORMATS)}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a matrix of floating-point numbers, got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    out_features, in_features = weight.shape
    num_groups = -(-in_features // GROUP)
    codes = weight.new_empty(
        out_features,
        num_groups,
        GROUP if format == "q8" else GROUP // 2,
        dtype=torch.int8 if format == "q8" else torch.uint8,
    )
    scales = weight.new_empty(out_features, num_groups, dtype=torch.float16)
    minimums = None if format == "q8" else torch.empty_like(scales)
    step = max(1, _ROWS // max(1, in_features))
    for first in range(0, out_features, step):
        part = slice(first, first + step)
        rows = weight.detach()[part].float()
        if minimums is None:
            codes[part], scales[part] = _q8(_groups(rows))
        else:
            codes[part], scales[part], minimums[part] = _q4(rows)
    return PackedWeight(codes, scales, minimums, in_features)


def _groups(rows: Tensor) -> Tensor:
    padded = F.pad(rows, (0, -rows.shape[1] % GROUP))
    return padded.view(len(rows), -1, GROUP)


def _q8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = _over(groups.abs().amax(-1), 127).half()
    codes = _nearest(groups, scales).clamp_(-127, 127)
    return codes.to(torch.int8), scales


def _q4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = _groups(rows)
    lowest, highest = groups.amin(-1), groups.amax(-1)
    rest = rows.shape[1] % GROUP
    if rest:  # padding is not among what the last grid must reach
        lowest[:, -1], highest[:, -1] = rows[:, -rest:].amin(-1), rows[:, -rest:].amax(-1)
    minimums = lowest.half()
    scales = _over(highest - minimums.float(), 15).half()
    codes = _nearest(groups - minimums.float().unsqueeze(-1), scales).clamp_(0, 15)
    if rest:
        codes[:, -1, rest:] = 0
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scales, minimums


def _over(values: Tensor, steps: int) -> Tensor:
    """values / steps, as a CPU has it: CUDA multiplies by the inverse of a plain number."""
    return values / torch.tensor(float(steps), device=values.device)


def _nearest(values: Tensor, scales: Tensor) -> Tensor:
    """The whole numbers nearest to values / scales; 0 where that is no number."""
    quotients = values / scales.float().unsqueeze(-1)
    return quotients.nan_to_num_(0.0, 0.0, 0.0).round_()
