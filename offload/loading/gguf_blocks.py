"""Blocks of GGUF files become packed weights, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cpu_ops.packed import GROUP, PackedWeight, quantise
from offload.loading.gguf_header import PLAIN_TYPES, GgufHeader
from offload.loading.quantised_checkpoint import FP4, FP4_OF_16, INT4, INT8, UINT8

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# The format whose grid has the numbers of a type. Scales and minimums of the K types, IQ4_XS and
# NVFP4 are products of two numbers, here rounded to float16: by 0.02 %.
_ON_GRID = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", INT4), "q4"),
    **dict.fromkeys(("Q8_0", "Q5_0", INT8), "q8"),
    **dict.fromkeys(("Q5_1", "Q5_K", UINT8), "q8m"),
    **dict.fromkeys(("Q6_K", "Q3_K"), "q8x16"),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4", FP4), "t4"),
    **dict.fromkeys(("NVFP4", FP4_OF_16), "t4x16"),
}
_TABLES = ("IQ4_NL", "IQ4_XS", "MXFP4")  # whole numbers, as q8 has them, too
_NOT_FINITE = 0x7C00  # the bits of float16's exponent
_ELEMENTS = 2**22  # of the rows that are read at a time


def format_of(type_name: str) -> str:
    """What keeps the numbers of a type: exactly, or as q8 rounded by up to 0.4 % of the largest in
    a group; "" of types that are not quantised."""
    return "" if type_name in PLAIN_TYPES else _ON_GRID.get(type_name, "q8")


def is_exact(type_name: str, format: str) -> bool:
    """Whether the format has the type's own numbers."""
    return _ON_GRID.get(type_name) == format or (format == "q8" and type_name in _TABLES)


def read_packed(header: GgufHeader, name: str, format: str) -> PackedWeight:
    """A matrix, or all of a tensor, in a format; rounded to nearest unless `is_exact`.

    Raises:
        ValueError: numbers that are not finite, or scales that float16 has not.
    """
    tensor = header.tensors[name]
    made: PackedWeight | None = None
    first = 0
    for blocks in _row_blocks(header, name):
        with np.errstate(all="ignore"):  # refused below
            if is_exact(tensor.type_name, format):
                part = _as_in_file(header, name, blocks, format)
            else:
                values = header.dequantised(name, blocks.reshape(len(blocks), -1))
                part = quantise(torch.from_numpy(values), format)
                if not np.isfinite(values).all():
                    part.scales.fill_(torch.nan)
        if made is None:
            made = _room_for(math.prod(tensor.shape[:-1]), part)
        last = first + part.out_features
        # NumPy works on this thread; torch would wake a team of threads for each part.
        made.codes[first:last].numpy()[:] = part.codes.numpy()
        for to, of in ((made.scales, part.scales), (made.minimums, part.minimums)):
            if to is None or of is None:
                continue
            to[first:last].numpy()[:] = of.numpy()
            if (of.view(torch.int16).numpy() & _NOT_FINITE == _NOT_FINITE).any():
                raise ValueError(
                    f"{header.path} holds numbers that are not finite in float16, in {name}"
                )
        first = last
    assert made is not None  # a matrix has rows
    return made


def _row_blocks(header: GgufHeader, name: str) -> Iterator[_Bytes]:
    """The tensor's bytes [rows, blocks, bytes of a block], some rows at a time."""
    import gguf

    tensor = header.tensors[name]
    num_rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    kind = gguf.GGMLQuantizationType[tensor.type_name]
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = columns // elements * block_bytes
    step = max(1, _ELEMENTS // columns)
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first) * row_bytes
        data = np.fromfile(header.path, np.uint8, count, offset=tensor.start + first * row_bytes)
        yield data.reshape(-1, columns // elements, block_bytes)


def _room_for(num_rows: int, part: PackedWeight) -> PackedWeight:
    minimums = part.minimums
    return PackedWeight(
        part.codes.new_empty(num_rows, *part.codes.shape[1:]),
        part.scales.new_empty(num_rows, part.scales.shape[1]),
        None if minimums is None else minimums.new_empty(num_rows, minimums.shape[1]),
        part.in_features,
        part.table,
    )


def _as_in_file(header: GgufHeader, name: str, blocks: _Bytes, format: str) -> PackedWeight:
    """The numbers of blocks [rows, blocks, bytes] of a tensor, of a type that `is_exact`."""
    from gguf import quants

    kind, rows, columns = (
        header.tensors[name].type_name,
        len(blocks),
        header.tensors[name].shape[-1],
    )

    def half(at: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        numbers = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
        return numbers.astype(np.float32)

    codes: Any = None  # of the values, see below
    scales, minimums, table = half(0), None, None
    if kind == "Q4_0":
        codes, minimums = blocks[..., 2:], -8 * scales
    elif kind == "Q4_1":
        codes, minimums = blocks[..., 4:], half(2)
    elif kind in ("Q4_K", "Q5_K"):
        of_scales, of_minimums = quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
        shape = (rows, -1, 8)
        minimums = -half(2) * of_minimums.reshape(shape)
        scales = scales * of_scales.reshape(shape)
        if kind == "Q4_K":
            # 32 bytes have two groups, one in their low halves and one in the high ones; here 16
            # have one, its first half in the low ones.
            both = blocks[..., 16:].reshape(rows, -1, 4, 2, 16)
            first, second = both[..., 0, :], both[..., 1, :]
            codes = np.stack(
                [first & 15 | (second & 15) << 4, first >> 4 | second & 0xF0], axis=-2
            ).astype(np.uint8)
    elif kind == "Q6_K":
        scales = half(208) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    elif kind == "Q3_K":
        low = np.concatenate([blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4], axis=-1)
        high = blocks[..., None, 104:108] >> 2 * np.arange(4, dtype=np.uint8)[:, None] & 3
        six_bits = low | high.reshape(rows, -1, 16) << 4
        scales = half(108) * (six_bits.astype(np.float32) - 32)
    elif kind == "Q8_0":
        codes = blocks[..., 2:].view(np.int8)
    elif kind in ("Q5_0", "Q5_1"):
        at = 2 if kind == "Q5_0" else 4
        highest = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
        codes = (_nibbles(blocks[..., at + 4 :]) | highest << 4).astype(np.int8)
        if kind == "Q5_0":
            codes -= 16
        else:
            minimums = half(2)
    elif kind == "NVFP4":
        table, scales = quants.NVFP4.kvalues, quants.NVFP4.ue4m3_to_fp32(blocks[..., :4])
        first, second = np.moveaxis(_nibbles(blocks[..., 4:].reshape(rows, -1, 2, 8)), -2, 0)
        codes = first | second << 4
    else:
        of_class = quants.MXFP4 if kind == "MXFP4" else quants.IQ4_NL
        table = of_class.kvalues
        begin = {"MXFP4": 1, "IQ4_NL": 2, "IQ4_XS": 8}[kind]
        codes = blocks[..., begin:]
        if format == "q8":
            codes = np.array(table, np.int8)[_nibbles(codes.reshape(rows, -1, 16))]
            table = None
        if kind == "MXFP4":
            scales = quants.MXFP4.e8m0_to_fp32_half(blocks[..., 0])
        elif kind == "IQ4_XS":
            low = _pairs(blocks[..., 4:8])
            both = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
            high = both >> 2 * np.arange(8, dtype=np.uint16) & 3
            scales = scales * ((low | high << 4).astype(np.float32) - 32)
    scales = scales.reshape(rows, -1)
    if codes is None:
        values = header.dequantised(name, blocks.reshape(rows, -1)).reshape(*scales.shape, -1)
        if minimums is not None:
            values = values - minimums.reshape(*scales.shape, 1)
        codes = np.rint(np.divide(values, scales[..., None], where=scales[..., None] != 0,
                                  out=np.zeros_like(values))).astype(np.int8)  # fmt: skip
    return PackedWeight(
        torch.from_numpy(np.ascontiguousarray(codes).reshape(rows, columns // GROUP, -1)),
        torch.from_numpy(scales.astype(np.float16)),
        None
        if minimums is None
        else torch.from_numpy(minimums.reshape(rows, -1).astype(np.float16)),
        columns,
        None if table is None else torch.tensor(table, dtype=torch.int8),
    )


def _nibbles(codes: _Bytes) -> _Bytes:
    """[..., n] -> [..., 2 * n]: the low halves, then the high ones."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _pairs(codes: _Bytes) -> _Bytes:
    """[..., n] -> [..., 2 * n]: low and high half of each in turn."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
