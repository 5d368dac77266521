"""Checked calls into the kernel that scores coded keys (`cpp/kernels/codes-inl.h`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import check_head_dim, isa_name

CODE_BLOCK: int = _native.CODE_BLOCK  # tokens whose codes lie together
Float32Array = npt.NDArray[np.float32]


def score_codes(
    query: Float32Array,
    levels: Float32Array,
    offsets: Float32Array,
    codes: npt.NDArray[np.uint8],
    scales: Float32Array,
    *,
    n: int,
    isa: str | None = None,
) -> Tensor:
    """The largest over the group of scale * query · levels[code] + offset: float32 [n].

    What a byte's halves add is rounded to 1/127 of the widest range that any of them has. What is
    no number counts as infinite.

    Args:
        query: float32 [group_size, head_dim]; offsets: [group_size].
        levels: float32 [2] or [4], of codes of 1 or 2 bits a dimension.
        codes: uint8 [blocks, head_dim * bits / 8, CODE_BLOCK]: a byte has neighbouring dimensions,
            the first in its lowest bits.
        scales: float32 [blocks * CODE_BLOCK].
        n: tokens to score.
    """
    group_size, head_dim = query.shape
    check_head_dim(head_dim)
    if len(levels) not in (2, 4):
        raise ValueError(f"levels must be 2 or 4, got {len(levels)}")
    bits = 1 if len(levels) == 2 else 2
    blocks = len(codes)
    if codes.shape[1:] != (head_dim * bits // 8, CODE_BLOCK) or codes.dtype != np.uint8:
        raise ValueError(
            f"codes of {bits} bits must be uint8 [blocks, {head_dim * bits // 8}, {CODE_BLOCK}],"
            f" got {codes.dtype} {list(codes.shape)}"
        )
    if not 1 <= group_size <= _native.MAX_GROUP_SIZE or offsets.shape != (group_size,):
        raise ValueError(f"expected offsets of {group_size} heads, got {list(offsets.shape)}")
    if scales.shape != (blocks * CODE_BLOCK,) or not 0 <= n <= len(scales):
        raise ValueError(
            f"{blocks} blocks have {blocks * CODE_BLOCK} scales and tokens,"
            f" got {list(scales.shape)} and n={n}"
        )
    arrays = [np.ascontiguousarray(x, np.float32) for x in (query, levels, offsets, scales)]
    codes = np.ascontiguousarray(codes)
    scores = torch.empty(n, dtype=torch.float32)
    _native.score_codes(
        isa or isa_name(),
        arrays[0].ctypes.data,
        group_size,
        head_dim,
        bits,
        arrays[1].ctypes.data,
        arrays[2].ctypes.data,
        codes.ctypes.data,
        arrays[3].ctypes.data,
        n,
        scores.data_ptr(),
    )
    return scores
