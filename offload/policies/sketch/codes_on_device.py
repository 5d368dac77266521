"""The codes of `codes`, made where the keys are: in torch, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_ops.codes import CODE_BLOCK
from offload.policies.sketch.codes import LEVELS, OUTER, rotation
from offload.selection.device_build import WORKSPACE_BYTES, to_device

_ELEMENT_BYTES = 32  # that an element of a key takes on the way to its code


def mean_keys(keys: Tensor) -> Tensor:
    """float32 [.., head_dim] of keys [.., kv_len, head_dim]; what is no number is 0."""
    return keys.mean(-2, dtype=torch.float32).nan_to_num(0.0, 0.0, 0.0)


def encode_keys(keys: Tensor, mean: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of keys less their mean, as `encode_rows` lays them out.

    Args:
        keys: [num_kv_heads, kv_len, head_dim]; mean: float32 [num_kv_heads, head_dim].

    Returns:
        uint8 [num_kv_heads, blocks, head_dim * bits / 8, CODE_BLOCK] and float32
        [num_kv_heads, blocks * CODE_BLOCK], 0 after the last token. A view: not contiguous.
    """
    num_heads, kv_len, head_dim = keys.shape
    blocks, code_bytes = -(-kv_len // CODE_BLOCK), head_dim * bits // 8
    device, tokens = keys.device, blocks * CODE_BLOCK
    codes = torch.zeros(num_heads, tokens, code_bytes, dtype=torch.uint8, device=device)
    scales = torch.zeros(num_heads, tokens, device=device)
    matrix, levels = to_device(rotation(head_dim), device), to_device(LEVELS[bits], device)
    tile = max(CODE_BLOCK, WORKSPACE_BYTES // (_ELEMENT_BYTES * num_heads * head_dim))
    for start in range(0, kv_len, tile):
        part = slice(start, min(start + tile, kv_len))
        rotated = (keys[:, part] - mean[:, None]) @ matrix
        codes[:, part], scales[:, part] = _encode(rotated, bits, levels)
    return codes.view(num_heads, blocks, CODE_BLOCK, code_bytes).mT, scales


def _encode(x: Tensor, bits: int, levels: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [.., head_dim * bits / 8] and float32 [..] of rotated keys float32 [.., head_dim]."""
    head_dim = x.shape[-1]
    squares = (x * x).sum(-1)
    of_dims = (x > 0.0).to(torch.uint8)
    if bits == 2:
        # In float64 up to the root, as on the host.
        outer = float(OUTER) * (squares.double() / head_dim).sqrt().float()[..., None]
        of_dims += x > outer
        of_dims += x > -outer
    product = (x * levels[of_dims.int()]).sum(-1)
    scales = torch.where(squares != 0.0, squares / product, 0.0)
    first, *others = of_dims.view(*x.shape[:-1], -1, 8 // bits).unbind(-1)
    for i, other in enumerate(others, 1):
        first = first | other << i * bits
    return first, scales
