"""The codes of a prompt's keys: one launch for many tokens.

`append_codes` makes those of a step's keys, by the same `codes_of` and `encoded`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_ops.checks import check_dims, check_tensor
from gpu_ops.launch import jit, jit_for_any, next_power_of_2, runs_kernel, tl

_ELEMENTS = 4096  # of a program's keys


@jit
def codes_of(
    x: tl.tensor,  # float32 [BLOCK_T, BLOCK_D]: rotated keys, 0 from HEAD_DIM on
    inner_level: tl.tensor,
    outer_level: tl.tensor,
    outer: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """uint8 [BLOCK_T, BLOCK_D * BITS / 8] and float32 [BLOCK_T]: codes and scales."""
    squares = tl.sum(x * x, 1)
    code = (x > 0.0).to(tl.int32)
    if BITS == 1:
        level = tl.where(x > 0.0, outer_level, -outer_level)
    else:
        bound = (outer * tl.sqrt(squares / HEAD_DIM))[:, None]
        code += (x > bound).to(tl.int32) + (x > -bound).to(tl.int32)
        size = tl.where((code == 0) | (code == 3), outer_level, inner_level)
        level = tl.where(code >= 2, size, -size)
    scale = squares / tl.where(squares != 0.0, tl.sum(x * level, 1), 1.0)
    DIMS: tl.constexpr = 8 // BITS
    e = tl.arange(0, x.shape[1])[None, :]
    spread = tl.reshape(code << (e % DIMS * BITS), [x.shape[0], x.shape[1] // DIMS, DIMS])
    return tl.sum(spread, 2).to(tl.uint8), scale


@jit_for_any("n", "code_stride", "scale_stride")
def encode_codes_kernel(
    rotated: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    n: tl.tensor,
    code_stride: tl.tensor,  # of heads
    scale_stride: tl.tensor,
    inner_level: tl.tensor,
    outer_level: tl.tensor,
    outer: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    CODE_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,  # divides CODE_BLOCK
    BLOCK_D: tl.constexpr,  # at least HEAD_DIM
) -> None:
    """One program per BLOCK_T tokens, also those behind the last, and head."""
    first, head = tl.program_id(0) * BLOCK_T, tl.program_id(1).to(tl.int64)
    t, d = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    inside = (t < n)[:, None] & (d < HEAD_DIM)[None, :]
    rows = rotated + head * n * HEAD_DIM
    x = tl.load(rows + t.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    code, scale = codes_of(x, inner_level, outer_level, outer, HEAD_DIM, BITS)
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    w = tl.arange(0, BLOCK_D * BITS // 8)[None, :]
    block = codes + head * code_stride + (first // CODE_BLOCK).to(tl.int64) * CODE_BLOCK * WIDTH
    tl.store(block + w * CODE_BLOCK + (t % CODE_BLOCK)[:, None], code, mask=w < WIDTH)
    tl.store(scales + head * scale_stride + t, scale)


def encode_codes(
    rotated: Tensor, levels: Sequence[float], outer: float, codes: Tensor, scales: Tensor
) -> None:
    """Write the codes and scales of rotated keys, and 0 for what is missing in the last block.

    Args:
        rotated: float32 [num_heads, n, head_dim], n at least 1.
        levels, outer: as `append_codes` takes them.
        codes: uint8 [num_heads, blocks, head_dim * bits / 8, tokens of a block], a power of two,
            for as many blocks as n tokens begin. Heads may lie apart, in scales, too.
        scales: float32 [num_heads, blocks * tokens of a block].
    """
    check_dims("rotated", rotated, "[num_heads, n, head_dim]")
    check_dims("codes", codes, "[num_heads, blocks, code_bytes, code_block]")
    num_heads, n, head_dim = rotated.shape
    code_block, bits, device = codes.shape[3], check_levels(levels), rotated.device
    if code_block & (code_block - 1):
        raise ValueError(f"codes must be of a power of two of tokens a block, got {code_block}")
    if head_dim * bits % 8:
        raise ValueError(f"codes of {bits} bits must be whole bytes, got head_dim {head_dim}")
    blocks = -(-n // code_block)
    check_tensor("rotated", rotated, rotated.shape, torch.float32, device)
    if not len(codes) == len(scales) == num_heads:
        raise ValueError(
            f"codes and scales must be of {num_heads} heads, got {len(codes)} and {len(scales)}"
        )
    width = head_dim * bits // 8
    check_tensor("codes[0]", codes[0], (blocks, width, code_block), torch.uint8, device)
    check_tensor("scales[0]", scales[0], (blocks * code_block,), torch.float32, device)
    if not runs_kernel(rotated):
        return encode_codes_reference(rotated, levels, outer, codes, scales)
    block_d = next_power_of_2(head_dim)
    block_t = min(code_block, max(1, _ELEMENTS // block_d))
    encode_codes_kernel[(blocks * code_block // block_t, num_heads)](
        rotated,
        codes,
        scales,
        n,
        codes.stride(0),
        scales.stride(0),
        float(levels[-2]),
        float(levels[-1]),
        float(outer),
        head_dim,
        bits,
        code_block,
        block_t,
        block_d,
        num_warps=4,
        enable_fp_fusion=False,
    )


def encode_codes_reference(
    rotated: Tensor, levels: Sequence[float], outer: float, codes: Tensor, scales: Tensor
) -> None:
    """`encode_codes` by torch."""
    missing = scales.shape[1] - rotated.shape[1]
    of_tokens, of_scales = encoded(
        torch.nn.functional.pad(rotated, (0, 0, 0, missing)), levels, outer
    )
    codes.copy_(of_tokens.view(codes.mT.shape).mT)
    scales.copy_(of_scales)


def encoded(x: Tensor, levels: Sequence[float], outer: float) -> tuple[Tensor, Tensor]:
    """uint8 [.., head_dim * bits / 8] and float32 [..] of rotated keys float32 [.., head_dim]."""
    bits = check_levels(levels)
    squares = (x * x).sum(-1)
    of_dims = (x > 0.0).int()
    if bits == 2:
        # In float64 up to the root, as on the host.
        bound = outer * (squares.double() / x.shape[-1]).sqrt().float()[..., None]
        of_dims += (x > bound).int() + (x > -bound).int()
    product = (x * torch.tensor(levels, dtype=torch.float32)[of_dims]).sum(-1)
    scales = torch.where(squares != 0.0, squares / product, 0.0)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32)
    codes = (of_dims.view(*x.shape[:-1], -1, 8 // bits) << shifts).sum(-1)
    return codes.to(torch.uint8), scales


def check_levels(levels: Sequence[float]) -> int:
    """Bits of a dimension's code; ValueError unless it is of 1 or 2."""
    if len(levels) not in (2, 4):
        raise ValueError(f"levels must be 2 or 4, got {len(levels)}")
    return len(levels).bit_length() - 1
