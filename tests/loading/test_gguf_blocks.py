"""Blocks of every GGUF type: what is read of them, and what is multiplied with that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from cpu_ops.linear import PackedLinear
from offload.loading import gguf_blocks
from offload.loading.gguf_blocks import format_of, is_exact, read_packed
from offload.loading.gguf_header import PLAIN_TYPES, GgufHeader, read_gguf_header

ROWS, COLUMNS = 48, 512
# `gguf` has no way to dequantise these.
INTERNAL = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64"}
TYPES = sorted({kind.name for kind in gguf.GGMLQuantizationType} - INTERNAL - {*PLAIN_TYPES})


def can_dequantise(name: str) -> bool:
    kind = gguf.GGMLQuantizationType[name]
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def blocks_of(name: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bytes, of which those are left whose numbers are of a size that weights have."""
    kind = gguf.GGMLQuantizationType[name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    needed, found = ROWS * COLUMNS // elements, []
    random = np.random.default_rng(seed)
    while sum(map(len, found)) < needed:
        made = random.integers(0, 256, (4096, num_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.dequantize(made, kind)).max(axis=-1)
        found.append(made[(largest > 0.01) & (largest < 10)])
    return np.concatenate(found)[:needed].reshape(ROWS, -1)


EXACT = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "q4"),
    **dict.fromkeys(("Q8_0", "Q5_0"), "q8"),
    **dict.fromkeys(("Q5_1", "Q5_K"), "q8m"),
    **dict.fromkeys(("Q3_K", "Q6_K"), "q8x16"),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4"), "t4"),
    "NVFP4": "t4x16",
}


def written(path: Path, name: str, blocks: np.ndarray[Any, Any]) -> GgufHeader:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_header(path)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [*filter(can_dequantise, TYPES)])
def test_every_type(name: str, tmp_path: Path, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, and products of a step, against `gguf.dequantize`."""
    header = written(tmp_path / "x.gguf", name, blocks_of(name))
    assert format_of(name) == EXACT.get(name, "q8")
    assert is_exact(name, format_of(name)) == (name in EXACT)
    monkeypatch.setattr(gguf_blocks, "_ELEMENTS", 5 * COLUMNS)  # the last part has other rows
    packed = read_packed(header, "w", format_of(name))
    expected = torch.from_numpy(header.float32("w")).double()
    limit = 0.01
    if is_exact(name, packed.format):
        products = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "NVFP4")  # their scales are
        limit = 5e-4 if name in products else 1e-7
    assert relative(packed.dequantise().double(), expected) < limit
    torch.manual_seed(0)
    x = torch.randn(3, COLUMNS)
    y = PackedLinear([packed], torch.float32)(pool, x)
    assert relative(y.double(), x.double() @ expected.T) < 0.01
    if packed.table is not None and packed.format == "t4":  # the same numbers, if they must be q8
        as_bytes = read_packed(header, "w", "q8").dequantise()
        assert as_bytes.equal(packed.dequantise())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "IQ4_NL", "Q6_K"])
def test_numbers_that_are_not_finite(name: str, tmp_path: Path) -> None:
    blocks = blocks_of(name)
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    at = num_bytes - 2 if name == "Q6_K" else 0
    blocks.reshape(-1, num_bytes)[-1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    header = written(tmp_path / "x.gguf", name, blocks)
    with pytest.raises(ValueError, match=r"x.gguf holds numbers that are not finite .* in w"):
        read_packed(header, "w", format_of(name))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (99, "'w' has an unknown type: 99 is not a valid GGMLQuantizationType"),
        (12, r"'w' has the shape \[4, 96\] in blocks of 256"),  # Q4_K
        (8, "'w' ends at byte|bytes follow the last tensor"),  # Q8_0 of other bytes
    ],
)
def test_types_and_block_counts_that_are_refused(kind: int, message: str, tmp_path: Path) -> None:
    """By the header, before a weight is read."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.ones((4, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    at = content.index(b"\x01\0\0\0\0\0\0\0w") + 9 + 4 + 2 * 8  # behind name and dimensions
    path.write_bytes(content[:at] + kind.to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ValueError, match=rf"x.gguf is truncated or damaged .*{message}"):
        read_gguf_header(path)


def test_a_type_that_nothing_reads_is_named(tmp_path: Path) -> None:
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_1][1]
    blocks = np.zeros((ROWS, COLUMNS // 32 * num_bytes), np.uint8)
    with pytest.raises(NotImplementedError, match="'w' has the type Q8_1, which the package gguf"):
        written(tmp_path / "x.gguf", "Q8_1", blocks)
