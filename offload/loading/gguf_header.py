"""The header of a GGUF file: metadata, and where its tensors are, all checked against the file.

The readers of gguf and transformers take counts and lengths as they are written: in a damaged file
they fail in many ways, or read on for ever. They see a file after this has accepted it.
"""

from __future__ import annotations

import functools
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # of ggml
_DEFAULT_ALIGNMENT = 32
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"} | {
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class GgufTensor:
    """`shape` is in torch's order; `start` and `stop` are bytes of the file."""

    shape: tuple[int, ...]
    type_name: str
    start: int
    stop: int

    @property
    def is_quantised(self) -> bool:
        return self.type_name not in PLAIN_TYPES


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself. Arrays in `metadata` are NumPy's, or lists of strings."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def float32(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values of a tensor, dequantised."""
        tensor = self.tensors[name]
        count = tensor.stop - tensor.start
        data = np.fromfile(self.path, np.uint8, count=count, offset=tensor.start)
        return self.dequantised(name, data.reshape(*tensor.shape[:-1], -1))

    def dequantised(
        self, name: str, rows: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values of rows of a tensor, of bytes [..., bytes of a row]."""
        import gguf

        kind = gguf.GGMLQuantizationType[self.tensors[name].type_name]
        return np.asarray(gguf.dequantize(rows, kind), np.float32)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file; no weight is read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not GGUF, truncated or damaged: names the file and what is wrong.
        NotImplementedError: a tensor of a type that nothing here reads.
    """
    check_gguf_magic(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        try:
            metadata, tensors = _read(reader)
        except ValueError as error:
            raise ValueError(
                f"{path} is truncated or damaged ({len(data)} bytes), at byte {reader.at}: {error}"
            ) from error
    for name, tensor in tensors.items():
        if not _can_dequantise(tensor.type_name):
            raise NotImplementedError(
                f"{path}: {name!r} has the type {tensor.type_name}, which the package gguf cannot "
                "dequantise; install a newer gguf, or take a file of another type, such as Q4_K"
            )
    return GgufHeader(path, metadata, tensors)


@functools.cache
def _can_dequantise(type_name: str) -> bool:
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return type_name in PLAIN_TYPES
    return True


def check_gguf_magic(path: Path) -> None:
    """Refuse what is missing, or cannot be GGUF by its first bytes."""
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")


class _Reader:
    """Takes values from the front of `data`, and never more than there are."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4  # after the magic

    def take(self, num_bytes: int) -> bytes:
        left = len(self.data) - self.at
        if num_bytes > left:
            raise ValueError(f"{num_bytes} bytes are expected here, {left} are left")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.numbers("<Q")
        return self.take(length).decode()

    def array(self, kind: int, count: int) -> Any:
        if kind not in _SCALARS:
            raise ValueError(f"unknown type of metadata {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.array(kind, 1)[0].item()
        kind, count = self.numbers("<IQ")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return self.array(kind, count)


def _read(reader: _Reader) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    version, num_tensors, num_keys = reader.numbers("<IQQ")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}; available: 2 and 3, little-endian")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"{key!r} is there twice")
        (kind,) = reader.numbers("<I")
        if key == "general.alignment" and kind != _UINT32:
            raise ValueError(f"{key} must be of type {_UINT32}, got {kind}")
        metadata[key] = reader.value(kind)
    described = [_read_tensor(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, got {alignment!r}")
    data_start = _aligned(reader.at, alignment)
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in described:
        if name in tensors:
            raise ValueError(f"the tensor {name!r} is there twice")
        tensors[name] = _locate(name, shape, kind, data_start + offset)
    _check_places(tensors, data_start, alignment, len(reader.data))
    return metadata, tensors


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of one tensor."""
    name = reader.string()
    (num_dimensions,) = reader.numbers("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has {num_dimensions} dimensions")
    shape = reader.numbers(f"<{num_dimensions}Q")[::-1]
    kind, offset = reader.numbers("<IQ")
    return name, shape, kind, offset


def _locate(name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    import gguf

    try:
        quantization = gguf.GGMLQuantizationType(kind)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name!r} has an unknown type: {error}") from error
    if not all(shape) or shape[-1] % block_elements:
        raise ValueError(f"{name!r} has the shape {list(shape)} in blocks of {block_elements}")
    num_bytes = prod(shape) // block_elements * block_bytes
    return GgufTensor(shape, quantization.name, start, start + num_bytes)


def _check_places(
    tensors: dict[str, GgufTensor], data_start: int, alignment: int, file_bytes: int
) -> None:
    """Tensors fill the rest of the file, each aligned."""
    expected = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start != expected:
            raise ValueError(f"{name!r} starts at byte {tensor.start}, expected at {expected}")
        if tensor.stop > file_bytes:
            raise ValueError(f"{name!r} ends at byte {tensor.stop}")
        expected = _aligned(tensor.stop, alignment)
    if file_bytes > expected:
        raise ValueError(f"{file_bytes - expected} bytes follow the last tensor")


def _aligned(byte: int, alignment: int) -> int:
    return -(-byte // alignment) * alignment
