"""Blocks of GGUF files as packed weights: no number is rounded."""

from __future__ import annotations

import numpy as np
import torch

from cpu_ops.packed import PackedWeight
from offload.loading.gguf_header import GgufHeader

# The format of each type whose blocks are a group of it.
EXACT = {"Q4_0": "q4", "Q4_1": "q4", "Q8_0": "q8"}
# Bytes of a group of 32 in the file: of the numbers before its codes, and all.
_BLOCKS = {"Q4_0": (2, 18), "Q4_1": (4, 20), "Q8_0": (2, 34)}


def file_blocks(header: GgufHeader, name: str) -> PackedWeight:
    """A matrix of one of the types of `EXACT`.

    Q4_0's minimum, -8 scales, is in float16 exactly, unless it is beyond 65,504.
    """
    tensor = header.tensors[name]
    before, block_bytes = _BLOCKS[tensor.type_name]
    data = np.fromfile(
        header.path, np.uint8, count=tensor.stop - tensor.start, offset=tensor.start
    ).reshape(tensor.shape[0], -1, block_bytes)
    numbers = torch.from_numpy(np.ascontiguousarray(data[..., :before]).view(np.float16))
    codes = torch.from_numpy(np.ascontiguousarray(data[..., before:]))
    scales = numbers[..., 0].contiguous()
    if tensor.type_name == "Q8_0":
        return PackedWeight(codes.view(torch.int8), scales, None, tensor.shape[1])
    minimums = scales * -8 if tensor.type_name == "Q4_0" else numbers[..., 1].contiguous()
    return PackedWeight(codes, scales, minimums, tensor.shape[1])
