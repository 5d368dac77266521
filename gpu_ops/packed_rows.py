"""Products of packed weights and a few rows on tensor cores: 2 to 16 rows, quantised as well.

A tensor core multiplies 16 outputs, 32 weights of each, with 8 rows. The four lanes that share an
output take four neighbouring bytes of a group each, which is as the codes lie in memory: with q4
the low halves are the instruction's first 16 weights and the high ones its last. So nothing passes
through shared memory, and codes are unpacked by two instructions for eight of them. Only Gluon,
Triton's language with layouts, can say so. Outputs are too few to keep the memory busy: groups are
split among programs, whose sums meet in a second kernel, with all that is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_gate
from gpu_ops.launch import gl, gluon_jit, has_gluon, jit, next_power_of_2, tl
from gpu_ops.silu_mul import activated

MOST_ROWS = 16
UNROLLED = 4  # groups whose loads are on their way together; buffers of rows end with whole ones
_WARPS = 4
_PROGRAMS = 400  # that keep the memory of a GPU busy
_BLOCK = 256  # outputs of a program that sums up


def has_tensor_cores(device: torch.device) -> bool:
    """Whether the kernel runs there; on a CPU, whether it can be compiled."""
    if not has_gluon or torch.version.hip is not None:
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


@gluon_jit
def _add_group(
    acc: gl.tensor,
    w: gl.tensor,  # codes of a group
    scale: gl.tensor,  # its numbers
    codes: gl.tensor,
    row_scales: gl.tensor,
    row_sums: gl.tensor,
    k: gl.tensor,
    x_inside: gl.tensor,
    FORMAT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    MMA: gl.constexpr,
    WEIGHTS: gl.constexpr,
) -> gl.tensor:
    if FORMAT == "q4":
        low = gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4
        )
        high = gl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
            "=r,r",
            [w],
            dtype=gl.int8,
            is_pure=True,
            pack=4,
        )
        both = gl.permute(gl.join(low, high), (0, 2, 1))
        w = gl.convert_layout(gl.reshape(both, (BLOCK_N, 32)), WEIGHTS)  # the same registers
    x = gl.load(codes, mask=x_inside, other=0)
    none = gl.zeros((BLOCK_N, ROWS), gl.int32, MMA)
    row_scale = gl.load(row_scales)[None, :]
    if FORMAT == "q8":
        of_weight = scale.to(gl.float32)[:, None]
    else:  # two float16: scale and minimum, or a scale of each half
        of_weight = (scale & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
        of_weight = of_weight.to(gl.float32)[:, None]
        other = (scale >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)[:, None]
    if FORMAT == "q8x16":
        is_high = (k >= 16)[:, None]
        of_high = gl.nvidia.ampere.mma_v2(w, gl.where(is_high, x, 0), none)
        acc += of_high.to(gl.float32) * (other * row_scale)
        x = gl.where(is_high, 0, x)
    elif FORMAT != "q8":
        acc += other * gl.load(row_sums)[None, :]
    dots = gl.nvidia.ampere.mma_v2(w, x, none)
    return acc + dots.to(gl.float32) * (of_weight * row_scale)


@gluon_jit
def few_rows_kernel(
    weight_codes: gl.tensor,
    weight_scales: gl.tensor,
    codes: gl.tensor,
    scales: gl.tensor,
    sums: gl.tensor,
    partial: gl.tensor,
    num_out: gl.tensor,
    num_rows: gl.tensor,
    groups_per_split: gl.tensor,
    NUM_GROUPS: gl.constexpr,
    ROW_GROUPS: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """One program per BLOCK_N outputs and split; groups behind the last one count nothing."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    CODES: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    BYTES: gl.constexpr = 16 if FORMAT == "q4" else 32
    HALVES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]] + ([[64, 0]] if BLOCK_N == 128 else []),
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[BLOCK_N, 16],
    )
    LOADED: gl.constexpr = HALVES if FORMAT == "q4" else WEIGHTS
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOADED))
    inside = (n < num_out)[:, None]
    byte = gl.arange(0, BYTES, gl.SliceLayout(0, LOADED))
    w = weight_codes + (n.to(gl.int64)[:, None] * (NUM_GROUPS * BYTES) + byte[None, :])
    out_n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
    out_inside = out_n < num_out
    s = weight_scales + out_n.to(gl.int64) * NUM_GROUPS
    k = gl.arange(0, 32, gl.SliceLayout(1, CODES))
    m = gl.arange(0, ROWS, gl.SliceLayout(0, CODES))
    x = codes + (k[:, None] + m[None, :] * (ROW_GROUPS * 32))
    x_inside = (m < num_rows)[None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    scales += row
    sums += row
    acc = gl.zeros((BLOCK_N, ROWS), gl.float32, MMA)
    start = gl.program_id(1) * groups_per_split
    for g in range(start, gl.minimum(start + groups_per_split, NUM_GROUPS), 4):
        w0 = gl.load(w + g * BYTES, mask=inside, other=0)
        w1 = gl.load(w + (g + 1) * BYTES, mask=inside & (g + 1 < NUM_GROUPS), other=0)
        w2 = gl.load(w + (g + 2) * BYTES, mask=inside & (g + 2 < NUM_GROUPS), other=0)
        w3 = gl.load(w + (g + 3) * BYTES, mask=inside & (g + 3 < NUM_GROUPS), other=0)
        s0 = gl.load(s + g, mask=out_inside, other=0)
        s1 = gl.load(s + g + 1, mask=out_inside & (g + 1 < NUM_GROUPS), other=0)
        s2 = gl.load(s + g + 2, mask=out_inside & (g + 2 < NUM_GROUPS), other=0)
        s3 = gl.load(s + g + 3, mask=out_inside & (g + 3 < NUM_GROUPS), other=0)
        acc = _add_group(
            acc, w0, s0, x + g * 32, scales + g * ROWS, sums + g * ROWS, k, x_inside,
            FORMAT, BLOCK_N, ROWS, MMA, WEIGHTS,
        )  # fmt: skip
        acc = _add_group(
            acc, w1, s1, x + (g + 1) * 32, scales + (g + 1) * ROWS, sums + (g + 1) * ROWS, k,
            x_inside, FORMAT, BLOCK_N, ROWS, MMA, WEIGHTS,
        )  # fmt: skip
        acc = _add_group(
            acc, w2, s2, x + (g + 2) * 32, scales + (g + 2) * ROWS, sums + (g + 2) * ROWS, k,
            x_inside, FORMAT, BLOCK_N, ROWS, MMA, WEIGHTS,
        )  # fmt: skip
        acc = _add_group(
            acc, w3, s3, x + (g + 3) * 32, scales + (g + 3) * ROWS, sums + (g + 3) * ROWS, k,
            x_inside, FORMAT, BLOCK_N, ROWS, MMA, WEIGHTS,
        )  # fmt: skip
    of_split = (gl.program_id(1) * ROWS + row)[None, :].to(gl.int64) * num_out
    gl.store(partial + (of_split + out_n[:, None]), acc, mask=out_inside[:, None])


@jit
def _summed(
    partial: tl.tensor, at: tl.tensor, inside: tl.tensor, of_split: tl.tensor, SPLITS: tl.constexpr
) -> tl.tensor:
    y = tl.load(partial + at, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        y += tl.load(partial + at + split * of_split, mask=inside, other=0.0)
    return y


@jit
def sum_splits_kernel(
    partial: tl.tensor,
    bias: tl.tensor,  # None: there is none; so with the next
    residual: tl.tensor,
    out: tl.tensor,
    num_out: tl.tensor,
    stride: tl.tensor,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    GLU: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row, `stride` elements apart in `out`, and BLOCK outputs of it."""
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    width = num_out * 2 if GLU else num_out
    at = row * width + n
    of_split = width.to(tl.int64) * ROWS
    y = _summed(partial, at, inside, of_split, SPLITS)
    if bias is not None:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if GLU:
        up = _summed(partial, at + num_out, inside, of_split, SPLITS)
        if bias is not None:
            up += tl.load(bias + num_out + n, mask=inside, other=0.0).to(tl.float32)
        gate = activated(y.to(tl.float32), GELU).to(dtype)
        y = (gate.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    if residual is not None:
        added = tl.load(residual + row * stride + n, mask=inside, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + added).to(dtype)
    tl.store(out + row * stride + n, y, mask=inside)


def few_rows(
    format: str,
    weight_codes: Tensor,
    weight_scales: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    glu: bool,
    gate: str = "silu",
) -> None:
    """Products of 2 to 16 rows and packed weights.

    Args:
        format, weight_codes, weight_scales: `PackedRows.format`, `.codes` and `.scales`.
        rows: int8 codes [n, whole groups * 32], scales and sums float32 [whole groups, 8 or 16]:
            `quantise_few_rows`.
        out: [n, outputs], half as many with `glu`; may be some columns of a tensor.
        bias: [outputs].
        residual: as `out`, of the same strides.
        gate: the activation of `glu`, "silu" or "gelu_tanh".
    """
    is_gelu = check_gate(gate)
    codes, scales, sums = rows
    num_rows, num_out = out.shape
    width, num_groups = weight_codes.shape[:2]
    chunks = -(-num_groups // UNROLLED)
    block_n = 128 if -(-width // 128) * chunks >= _PROGRAMS else 64
    num_blocks = -(-width // block_n)
    per_split = -(-chunks // max(1, min(chunks, -(-_PROGRAMS // num_blocks)))) * UNROLLED
    num_splits = -(-num_groups // per_split)
    most_rows = scales.shape[1]
    partial = scales.new_empty(num_splits, most_rows, width)
    few_rows_kernel[(num_blocks, num_splits)](
        weight_codes, weight_scales, codes, scales, sums, partial, width, num_rows, per_split,
        num_groups, scales.shape[0], format, block_n, most_rows, _WARPS,
        num_warps=_WARPS,
    )  # fmt: skip
    block = min(_BLOCK, next_power_of_2(num_out))
    sum_splits_kernel[(num_rows, -(-num_out // block))](
        partial, bias, residual, out, num_out, out.stride(0), num_splits, most_rows, glu, is_gelu,
        block,
    )  # fmt: skip
