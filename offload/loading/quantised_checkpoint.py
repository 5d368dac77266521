"""Matrices that others have quantised, in safetensors files: GPTQ, AWQ, compressed-tensors, FP8,
MXFP4, bitsandbytes.

A matrix is several tensors there: whole numbers, packed or not, scales, and zero points. It becomes
a `PackedWeight` with the numbers of the file, where the grid of one holds them, or float32.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cpu_ops.packed import GROUP, PackedWeight
from offload.models.missing_features import quantised_weights

# How a matrix is stored, as `Checkpoint.stored_types` has it: int4 with zero points, int8 around 0,
# int8 with zero points elsewhere, 8-bit floating point, four bits of a table with scales to 32
# inputs or more, or to 16.
INT4, INT8, UINT8, FP8, FP4, FP4_OF_16 = "INT4", "INT8", "UINT8", "FP8", "FP4", "FP4_OF_16"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each half byte of a word is of
# Twice the numbers of e2m1, by their bits.
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class QuantisedFormat(ABC):
    """How one method stores a matrix [out_features, in_features].

    Attributes:
        name: of the method.
        bits: of a number.
        group: inputs that share a scale; 0: all of them.
        is_symmetric: no number has a zero point; where it matters.
    """

    name: str
    bits: int
    group: int
    is_symmetric: bool = False

    marks: ClassVar[str]  # suffix of the tensor by which a matrix is known
    others: ClassVar[tuple[str, ...]]

    @property
    def kind(self) -> str:
        """Of the names above."""
        return INT4 if self.bits == 4 else UINT8

    @abstractmethod
    def size(self, shapes: Shapes) -> tuple[int, int]:
        """(out_features, in_features) by the shapes of its tensors, by suffix; ValueError if they
        contradict each other."""

    @abstractmethod
    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        """A matrix of its tensors by suffix; float32 if no grid holds it."""

    def prefix(self, name: str) -> str:
        """What the names of the tensors of the matrix `name` begin with."""
        return name.removesuffix("weight")

    def logical(
        self, stored: Shapes, path: Path, load: Callable[[str], Tensor]
    ) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """The shapes of a model's parameters, matrices by the names of the plain ones; and which
        are quantised.

        Args:
            load: a tensor by its name, for what shapes do not tell.

        Raises:
            ValueError: names the matrix whose tensors do not fit each other.
        """
        prefixes = {
            name.removesuffix(self.marks) for name in stored if name.endswith(f".{self.marks}")
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            prefix, _, suffix = name.rpartition(".")
            if f"{prefix}." not in prefixes or suffix not in (self.marks, *self.others):
                shapes[name] = shape
        for prefix in prefixes:
            own = {suffix: stored[prefix + suffix] for suffix in (self.marks, *self.others)
                   if prefix + suffix in stored}  # fmt: skip
            try:
                shapes[f"{prefix}weight"] = self.size(own)
            except (KeyError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{path}: {prefix.removesuffix('.')} is no matrix of {self.name} with "
                    f"{self.bits} bits and groups of {self.group or 'all inputs'}: {error!r}"
                ) from error
        return shapes, {f"{prefix}weight" for prefix in prefixes}

    def _check_groups(self, num_in: int, scales: tuple[int, ...], axis: int) -> None:
        if num_in % GROUP or (self.group and (self.group % GROUP or num_in % self.group)):
            raise ValueError(f"{num_in} inputs are not whole groups of {self.group or GROUP}")
        wanted = num_in // self.group if self.group else 1
        if scales[axis] != wanted:
            raise ValueError(f"scales {list(scales)} are not of {wanted} groups")


class _Gptq(QuantisedFormat):
    """qweight int32 [in / 8, out], of which a word has eight inputs; qzeros [groups, out / 8]."""

    marks, others = "qweight", ("qzeros", "scales", "g_idx")
    zero_offset = 1  # that files lack

    @property
    def kind(self) -> str:
        return INT4 if self.bits == 4 else INT8 if self.is_symmetric else UINT8

    def size(self, shapes: Shapes) -> tuple[int, int]:
        words, num_out = shapes["qweight"]
        num_in = words * 32 // self.bits
        self._check_groups(num_in, shapes["scales"], 0)
        if shapes["scales"][1] != num_out or shapes["qzeros"][1] != num_out * self.bits // 32:
            raise ValueError(f"qweight {list(shapes['qweight'])}, scales {list(shapes['scales'])}")
        return num_out, num_in

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        codes = _unpacked(parts["qweight"], self.bits, 0).T
        zeros = _unpacked(parts["qzeros"], self.bits, 1).T + self.zero_offset
        order = parts.get("g_idx")
        if order is not None and self.group:
            in_order = torch.arange(codes.shape[1]) // self.group
            if order.numel() and not torch.equal(order.long(), in_order):
                raise NotImplementedError(
                    "its g_idx has inputs in another order (desc_act), which is not supported; "
                    "take a checkpoint that was quantised with desc_act=False"
                )
        return _on_grid(codes, parts["scales"].T, zeros, self.bits)


class _Awq(QuantisedFormat):
    """qweight int32 [in, out / 8], of which a word has eight outputs; qzeros [groups, out / 8]."""

    marks, others = "qweight", ("qzeros", "scales")

    def size(self, shapes: Shapes) -> tuple[int, int]:
        num_in, words = shapes["qweight"]
        self._check_groups(num_in, shapes["scales"], 0)
        if shapes["scales"][1] != words * 8 or shapes["qzeros"][1] != words:
            raise ValueError(f"qweight {list(shapes['qweight'])}, scales {list(shapes['scales'])}")
        return words * 8, num_in

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        codes, zeros = (
            _unpacked(parts[name], 4, 1, order=_AWQ_ORDER).T for name in ("qweight", "qzeros")
        )
        return _on_grid(codes, parts["scales"].T, zeros, 4)


class _PackQuantised(QuantisedFormat):
    """compressed-tensors: weight_packed int32 [out, in / 8] or [out, in / 4] around 0, weight_scale
    [out, groups], and weight_zero_point int32 [out / 8, groups] where numbers are asymmetric."""

    marks, others = "weight_packed", ("weight_scale", "weight_shape", "weight_zero_point")

    @property
    def kind(self) -> str:
        return INT4 if self.bits == 4 else INT8

    def size(self, shapes: Shapes) -> tuple[int, int]:
        num_out, words = shapes["weight_packed"]
        num_in = words * 32 // self.bits
        self._check_groups(num_in, shapes["weight_scale"], 1)
        if shapes["weight_scale"][0] != num_out:
            raise ValueError(
                f"weight_scale {list(shapes['weight_scale'])} is not of {num_out} rows"
            )
        return num_out, num_in

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        codes, scales = _unpacked(parts["weight_packed"], self.bits, 1), parts["weight_scale"]
        zeros = torch.full(scales.shape, 1 << (self.bits - 1))
        if "weight_zero_point" in parts:
            zeros = _unpacked(parts["weight_zero_point"], self.bits, 0)[: len(codes)]
        return _on_grid(codes, scales, zeros, self.bits)


class _IntQuantised(QuantisedFormat):
    """compressed-tensors: weight int8 [out, in], weight_scale [out, groups]."""

    marks, others = "weight_scale", ("weight", "weight_zero_point")

    @property
    def kind(self) -> str:
        return INT8

    def size(self, shapes: Shapes) -> tuple[int, int]:
        num_out, num_in = shapes["weight"]
        self._check_groups(num_in, shapes["weight_scale"], 1)
        return num_out, num_in

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        scales = parts["weight_scale"]
        zeros = parts.get("weight_zero_point", torch.zeros(scales.shape)).long()
        return _on_grid(parts["weight"].long() + 128, scales, zeros + 128, 8)


class _Fp8(QuantisedFormat):
    """weight float8 [out, in] and scales of blocks (weight_scale_inv), rows, or all
    (weight_scale)."""

    marks, others = "weight_scale_inv", ("weight", "input_scale", "activation_scale")

    @property
    def kind(self) -> str:
        return FP8

    def size(self, shapes: Shapes) -> tuple[int, int]:
        num_out, num_in = shapes["weight"]
        scales = [*shapes[self.marks], 1, 1][:2] if shapes[self.marks] else [1, 1]
        if any(n > size for n, size in zip(scales, (num_out, num_in), strict=True)):
            raise ValueError(f"{self.marks} {list(shapes[self.marks])} of {num_out} x {num_in}")
        return num_out, num_in

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        weight, scales = parts["weight"].float(), parts[self.marks].float()
        scales = scales.reshape([*scales.shape, 1, 1][:2]) if scales.dim() else scales.view(1, 1)
        for axis in (0, 1):
            block = self.group or math.ceil(weight.shape[axis] / scales.shape[axis])
            if scales.shape[axis] == 1:
                block = weight.shape[axis]
            scales = scales.repeat_interleave(block, axis)
        return weight * scales[: weight.shape[0], : weight.shape[1]]


class _Fp8Channels(_Fp8):
    marks = "weight_scale"


class _NvFp4(QuantisedFormat):
    """compressed-tensors: weight_packed uint8 [out, in / 2] of e2m1, the first of two in the low
    half; weight_scale float8 [out, in / 16], all divided by weight_global_scale."""

    marks = "weight_packed"
    others = ("weight_scale", "weight_global_scale", "input_global_scale")

    @property
    def kind(self) -> str:
        return FP4_OF_16

    def size(self, shapes: Shapes) -> tuple[int, int]:
        num_out, num_bytes = shapes["weight_packed"]
        num_in = 2 * num_bytes
        if num_in % GROUP or shapes["weight_scale"] != (num_out, num_in // 16):
            raise ValueError(f"weight_scale {list(shapes['weight_scale'])} of {num_out} x {num_in}")
        return num_out, num_in

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        scales = parts["weight_scale"].float() / parts["weight_global_scale"].float().view(1, 1)
        return _of_table(_pairs(parts["weight_packed"]), scales / 2, _E2M1)


class _MxFp4(QuantisedFormat):
    """Experts' matrices: {name}_blocks uint8 [experts, out, groups, 16] of e2m1, the first of two
    in the low half, and {name}_scales uint8 [experts, out, groups], exponents of 2.

    The parameter is [experts, in, out]; packed, it is [experts * out, in].
    """

    marks, others = "_blocks", ("_scales",)

    @property
    def kind(self) -> str:
        return FP4

    def prefix(self, name: str) -> str:
        return name

    def logical(
        self, stored: Shapes, path: Path, load: Callable[[str], Tensor]
    ) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        names = {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}
        parts = {f"{name}{suffix}" for name in names for suffix in (self.marks, *self.others)}
        shapes = {name: shape for name, shape in stored.items() if name not in parts}
        if not names:
            raise ValueError(f"{path}: its config.json says mxfp4, but no tensor is named *_blocks")
        for name in names:
            blocks, scales = stored[f"{name}_blocks"], stored.get(f"{name}_scales")
            if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
                raise ValueError(
                    f"{path}: {name} is no matrix of mxfp4: blocks {list(blocks)} and scales "
                    f"{None if scales is None else list(scales)}"
                )
            shapes[name] = (blocks[0], blocks[2] * GROUP, blocks[1])
        return shapes, names

    def size(self, shapes: Shapes) -> tuple[int, int]:
        raise NotImplementedError  # of experts: `logical`

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        codes, scales = _pairs(parts["_blocks"]).flatten(2), parts["_scales"].int()
        if (scales == 255).any():
            raise ValueError("a scale of 255, which stands for no number")
        return _of_table(codes.flatten(0, 1), torch.exp2(scales - 128.0).flatten(0, 1), _E2M1)


class _Bitsandbytes(QuantisedFormat):
    """weight uint8 [elements / 2, 1] of codes of quant_map [16], the first of two in the high half.

    absmax, of blocks of neighbouring elements, is float32; or (nested) codes of nested_quant_map,
    with a nested_absmax of blocks of them, and an offset.
    """

    marks = "weight.quant_map"
    others = (
        *("weight", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"weight.quant_state.bitsandbytes__{kind}4" for kind in ("nf", "fp")),
    )

    @property
    def kind(self) -> str:
        return FP4

    def logical(
        self, stored: Shapes, path: Path, load: Callable[[str], Tensor]
    ) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        prefixes = {name.removesuffix(self.marks) for name in stored if name.endswith(self.marks)}
        names = {f"{prefix}{name}" for prefix in prefixes for name in (self.marks, *self.others)}
        shapes = {name: shape for name, shape in stored.items() if name not in names}
        for prefix in prefixes:
            try:
                parts = {suffix: load(prefix + suffix) for suffix in self.others[-2:]
                         if prefix + suffix in stored}  # fmt: skip
                state = self._state(parts)
                num_out, num_in = map(int, state["shape"])
                num_blocks = num_out * num_in // state["blocksize"]
                found = math.prod(stored[f"{prefix}weight"])
                if found * 2 != num_out * num_in or num_in % GROUP or state["blocksize"] % GROUP:
                    raise ValueError(f"{found} bytes for {num_out} x {num_in}")
                if math.prod(stored[f"{prefix}weight.absmax"]) != num_blocks:
                    raise ValueError(f"absmax is not of {num_blocks} blocks")
            except (LookupError, ArithmeticError, ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}: {prefix.removesuffix('.')} is no matrix of bitsandbytes with 4 bits: "
                    f"{error!r}"
                ) from error
            shapes[f"{prefix}weight"] = (num_out, num_in)
        return shapes, {f"{prefix}weight" for prefix in prefixes}

    def size(self, shapes: Shapes) -> tuple[int, int]:
        raise NotImplementedError  # their state has it: `logical`

    def read(self, parts: Mapping[str, Tensor]) -> PackedWeight | Tensor:
        state, absmax = self._state(parts), parts["weight.absmax"]
        num_out, num_in = state["shape"]
        if "weight.nested_absmax" in parts:
            codes = parts["weight.nested_quant_map"].float()[absmax.int()]
            of_blocks = parts["weight.nested_absmax"].float()
            of_blocks = of_blocks.repeat_interleave(state["nested_blocksize"])[: len(codes)]
            absmax = codes * of_blocks + state["nested_offset"]
        scales = absmax.float().repeat_interleave(state["blocksize"] // GROUP).view(num_out, -1)
        pairs = parts["weight"].flatten().view(torch.uint8)
        codes = torch.stack([pairs >> 4, pairs & 15], -1).view(num_out, num_in)
        table, unit = _whole(parts["weight.quant_map"].float())
        return _of_table(codes, scales * unit, table)

    def _state(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        found = [parts[name] for name in self.others[-2:] if name in parts]
        state: dict[str, Any] = json.loads(bytes(found[0].tolist()))
        return state


class _GptqV2(_Gptq):
    zero_offset = 0


def quantised_format(config: Mapping[str, Any], path: Path) -> QuantisedFormat | None:
    """How the matrices of a checkpoint are stored, by the quantization_config in its config.json at
    `path`; None: as they are.

    Raises:
        ValueError: a quantization_config that makes no sense.
        NotImplementedError: a method, or a variant of one, that is not supported; names it.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path}: quantization_config must be an object with quant_method, got {settings!r}"
        )
    method = str(settings.get("quant_method", "unknown"))
    makers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8,
              "mxfp4": _mxfp4, "bitsandbytes": _bitsandbytes}  # fmt: skip
    if method not in makers:
        raise NotImplementedError(f"{path.parent} holds {quantised_weights(method)}")
    try:
        return makers[method](settings)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{path.parent} holds weights quantised with {method!r} and {error}, which is not "
            "supported"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: quantization_config of {method!r}: {error!r}") from error


def _number(settings: Mapping[str, Any], *names: str) -> int:
    value = next((settings[name] for name in names if name in settings), None)
    if type(value) is not int:
        raise ValueError(f"{names[0]} must be an integer, got {value!r}")
    return value


def _bits(settings: Mapping[str, Any], known: tuple[int, ...], *names: str) -> int:
    bits = _number(settings, *names)
    if bits not in known:
        raise NotImplementedError(f"{bits} bits")
    return bits


def _gptq(settings: Mapping[str, Any]) -> QuantisedFormat:
    if settings.get("desc_act"):
        raise NotImplementedError("desc_act=True (inputs in another order, g_idx)")
    made = _GptqV2 if settings.get("checkpoint_format") == "gptq_v2" else _Gptq
    group = max(0, _number(settings, "group_size"))
    is_symmetric = settings.get("sym") is True
    return made("gptq", _bits(settings, (4, 8), "bits"), group, is_symmetric)


def _awq(settings: Mapping[str, Any]) -> QuantisedFormat:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise NotImplementedError(f"version={version!r}")
    bits = _bits(settings, (4,), "bits", "w_bit")
    return _Awq("awq", bits, max(0, _number(settings, "group_size", "q_group_size")))


def _compressed(settings: Mapping[str, Any]) -> QuantisedFormat:
    groups = list(settings["config_groups"].values())
    if len(groups) != 1:
        raise NotImplementedError(f"{len(groups)} groups of modules")
    weights, layout = groups[0]["weights"], settings.get("format")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise NotImplementedError(f"actorder={weights['actorder']!r} (g_idx)")
    size = weights.get("group_size") or 0
    group = size if size > 0 else 0
    if layout == "pack-quantized":
        return _PackQuantised("compressed-tensors", _bits(weights, (4, 8), "num_bits"), group)
    if layout == "int-quantized":
        return _IntQuantised("compressed-tensors", _bits(weights, (8,), "num_bits"), group)
    if layout in ("float-quantized", "naive-quantized") and weights.get("type") == "float":
        return _Fp8Channels("compressed-tensors", _bits(weights, (8,), "num_bits"), 0)
    if layout == "nvfp4-pack-quantized":
        return _NvFp4("compressed-tensors", _bits(weights, (4,), "num_bits"), 16)
    raise NotImplementedError(f"format={layout!r}")


def _mxfp4(settings: Mapping[str, Any]) -> QuantisedFormat:
    return _MxFp4("mxfp4", 4, GROUP)


def _bitsandbytes(settings: Mapping[str, Any]) -> QuantisedFormat:
    if not settings.get("load_in_4bit"):
        raise NotImplementedError("8 bits (load_in_8bit)")
    if str(settings.get("bnb_4bit_quant_storage", "uint8")) not in ("uint8", "torch.uint8"):
        raise NotImplementedError(f"bnb_4bit_quant_storage={settings['bnb_4bit_quant_storage']!r}")
    return _Bitsandbytes("bitsandbytes", 4, 64)


def _fp8(settings: Mapping[str, Any]) -> QuantisedFormat:
    block = settings.get("weight_block_size") or [0, 0]
    if len({*block}) != 1:
        raise NotImplementedError(f"weight_block_size={block}")
    return _Fp8("fp8", 8, int(block[0]))


def _pairs(codes: Tensor) -> Tensor:
    """uint8 [..., n] of two numbers each, the first in the low half -> [..., 2 * n]."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def _whole(table: Tensor) -> tuple[Tensor, float]:
    """int8 [16] that times a unit are nearly `table`, whose numbers are at most 1.

    Of NF4's they are 0.33 % off, and normally distributed weights 0.5 %, in relative L2.
    """
    steps = torch.arange(64.0, 127.25, 0.25)
    rounded = (table * steps.unsqueeze(1)).round()
    best = int((rounded / steps.unsqueeze(1) - table).norm(dim=1).argmin())
    return rounded[best].to(torch.int8), 1 / float(steps[best])


def _of_table(codes: Tensor, scales: Tensor, table: Tensor) -> PackedWeight:
    """table[codes] * scales.

    Args:
        codes: uint8 [out_features, in_features].
        scales: [out_features, groups] of 32 or 16.
        table: int8 [16].
    """
    low, high = codes.view(len(codes), -1, GROUP).chunk(2, -1)
    scales = scales.half().contiguous()
    return PackedWeight(low | high << 4, scales, None, codes.shape[1], table.clone())


def _unpacked(words: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """int64 numbers of `bits` bits of int32 words, which become 32 / bits along `axis`, the lowest
    bits first; `order`: which of them each is."""
    shifts = torch.arange(0, 32, bits)
    if order:
        shifts = shifts[torch.tensor(order).argsort()]
    shape = (-1, 1) if axis == 0 else (-1,)
    numbers = words.long().unsqueeze(axis + 1) >> shifts.view(shape) & (1 << bits) - 1
    return numbers.flatten(axis, axis + 1)


def _on_grid(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> PackedWeight | Tensor:
    """(codes - zeros) * scales.

    Args:
        codes: [out_features, in_features] of `bits` bits, 0 the least.
        scales, zeros: [out_features, groups].
    """
    num_out, num_in = codes.shape
    repeats = num_in // GROUP // scales.shape[1]
    scales = scales.half().repeat_interleave(repeats, 1).contiguous()
    zeros = zeros.repeat_interleave(repeats, 1)
    groups = codes.contiguous().view(num_out, -1, GROUP)
    least = 0 if bits == 4 else 128  # of the file's codes, what is 0 in ours
    minimums = ((least - zeros.float()) * scales.float()).half().contiguous()
    if bits == 4:
        low, high = groups.to(torch.uint8).chunk(2, -1)
        return PackedWeight(low | high << 4, scales, minimums, num_in)
    made = PackedWeight((groups - 128).to(torch.int8), scales, minimums, num_in)
    return dataclasses.replace(made, minimums=None) if (zeros == 128).all() else made
