"""Keys as codes of 1 or 2 bits a dimension.

A key is rotated, so that no dimension has more of it than the others, and each dimension becomes
the nearest of a few levels: its sign, or of 2 bits the best four for a normal distribution (Lloyd
and Max). What a token's levels are multiplied by makes the product of the code and the key itself
exact (as RaBitQ, Gao and Long, SIGMOD 2024, does for its sign codes).

The rotation is a Hadamard transform of randomly signed dimensions; where head_dim is no power of
two, of runs of the largest one that divides it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cpu_ops.codes import CODE_BLOCK
from cpu_ops.native import MAX_HEAD_DIM
from offload.selection.compiled import cached_njit

# Of the 4 levels of a standard normal distribution: where the outer ones begin.
OUTER = np.float32(0.98160)
LEVELS: dict[int, npt.NDArray[np.float32]] = {
    1: np.array([-1.0, 1.0], np.float32),
    2: np.array([-1.51040, -0.45278, 0.45278, 1.51040], np.float32),
}
_SIGNS = np.where(np.random.default_rng(0).random(MAX_HEAD_DIM) < 0.5, -1, 1)
_SIGNS = _SIGNS.astype(np.float32)


@cached_njit(nogil=True)
def rotate(x: Any) -> None:
    """Rotate float32 [head_dim] in place."""
    width = len(x) & -len(x)
    factor = np.float32(1.0 / math.sqrt(width))
    for d in range(len(x)):
        x[d] *= factor * _SIGNS[d]
    step = 1
    while step < width:
        for begin in range(0, len(x), 2 * step):
            for d in range(begin, begin + step):
                a, b = x[d], x[d + step]
                x[d] = a + b
                x[d + step] = a - b
        step *= 2


@cache
def rotation(head_dim: int) -> npt.NDArray[np.float32]:
    """float32 [head_dim, head_dim]: x @ rotation is what `rotate` makes of x."""
    rows = np.eye(head_dim, dtype=np.float32)
    for row in rows:
        rotate(row)
    return rows


@cached_njit(nogil=True)
def encode(x: Any, bits: Any, levels: Any, codes: Any, scales: Any, token: Any) -> None:
    """Write the code of a key and its scale.

    A key that is not finite has a scale that is no number.

    Args:
        x: float32 [head_dim], rotated.
        codes: uint8 [blocks * head_dim * bits / 8 * CODE_BLOCK] and
        scales: float32 [blocks * CODE_BLOCK] of a KV head.
    """
    squares = np.float32(0.0)
    for d in range(len(x)):
        squares += x[d] * x[d]
    outer = OUTER * np.float32(math.sqrt(squares / len(x)))
    product = np.float32(0.0)
    dims = 8 // bits
    num_bytes = len(x) // dims
    at = token // CODE_BLOCK * num_bytes * CODE_BLOCK + token % CODE_BLOCK
    for j in range(num_bytes):
        byte = 0
        for i in range(dims):
            element = x[j * dims + i]
            code = int(element > 0.0)
            if bits == 2:
                code += int(element > outer) + int(element > -outer)
            product += element * levels[code]
            byte |= code << (i * bits)
        codes[at + j * CODE_BLOCK] = byte
    scales[token] = squares / product if squares != 0.0 else np.float32(0.0)


@cached_njit(nogil=True)
def encode_rows(
    rows: Any, mean: Any, bits: Any, levels: Any, codes: Any, scales: Any, first: Any
) -> None:
    """Codes of the keys float32 [n, head_dim] of the tokens from `first` on, less their mean.

    `rows` is overwritten.
    """
    for i in range(len(rows)):
        x = rows[i]
        x -= mean
        rotate(x)
        encode(x, bits, levels, codes, scales, first + i)
