"""The codes of `codes`, made where the keys are, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_ops.codes import CODE_BLOCK
from gpu_ops.encode_codes import encode_codes
from offload.policies.sketch.codes import LEVELS, OUTER, rotation
from offload.selection.device_build import WORKSPACE_BYTES, to_device

_ELEMENT_BYTES = 8  # of a key on the way to its code: less the mean, and rotated


def mean_keys(keys: Tensor) -> Tensor:
    """float32 [.., head_dim] of keys [.., kv_len, head_dim]; what is no number is 0."""
    return keys.mean(-2, dtype=torch.float32).nan_to_num(0.0, 0.0, 0.0)


def encode_keys(keys: Tensor, mean: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of keys less their mean, as `encode_rows` lays them out.

    Args:
        keys: [num_kv_heads, kv_len, head_dim]; mean: float32 [num_kv_heads, head_dim].

    Returns:
        uint8 [num_kv_heads, blocks, head_dim * bits / 8, CODE_BLOCK] and float32
        [num_kv_heads, blocks * CODE_BLOCK], 0 after the last token.
    """
    num_heads, kv_len, head_dim = keys.shape
    blocks, code_bytes = -(-kv_len // CODE_BLOCK), head_dim * bits // 8
    device, levels = keys.device, LEVELS[bits].tolist()
    shape = (num_heads, blocks, code_bytes, CODE_BLOCK)
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    scales = torch.empty(num_heads, blocks * CODE_BLOCK, device=device)
    matrix = to_device(rotation(head_dim), device)
    of_block = _ELEMENT_BYTES * num_heads * head_dim * CODE_BLOCK
    at_once = max(1, WORKSPACE_BYTES // of_block)
    for first in range(0, blocks, at_once):
        part = slice(first, first + at_once)
        tokens = slice(first * CODE_BLOCK, (first + at_once) * CODE_BLOCK)
        encode_codes(
            (keys[:, tokens] - mean[:, None]) @ matrix,  # in no variable: gone before the next
            levels,
            float(OUTER),
            codes[:, part],
            scales[:, tokens],
        )
    return codes, scales
