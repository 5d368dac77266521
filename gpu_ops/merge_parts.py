"""The merge of parts of a prefill slice's attention: over keys that different calls looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_tensor
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl

_QUERIES = 16  # of a program


@jit
def merge_parts_kernel(
    o: tl.tensor,
    lse: tl.tensor,
    part: tl.tensor,
    part_lse: tl.tensor,
    n: tl.tensor,
    o_head_stride: tl.tensor,
    o_query_stride: tl.tensor,
    part_head_stride: tl.tensor,
    part_query_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program per BLOCK_N queries of a head."""
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    present = query < n
    a = tl.load(lse + head * n + query, mask=present, other=0.0)
    b = tl.load(part_lse + head * n + query, mask=present, other=0.0)
    largest = tl.maximum(a, b)
    weight_a, weight_b = tl.exp(a - largest), tl.exp(b - largest)
    total = weight_a + weight_b
    d = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (d < HEAD_DIM)[None, :]
    out = o + head * o_head_stride + query[:, None] * o_query_stride + d[None, :]
    other = part + head * part_head_stride + query[:, None] * part_query_stride + d[None, :]
    x = tl.load(out, mask=inside, other=0.0).to(tl.float32) * (weight_a / total)[:, None]
    y = tl.load(other, mask=inside, other=0.0).to(tl.float32) * (weight_b / total)[:, None]
    tl.store(out, (x + y).to(o.dtype.element_ty), mask=inside)
    tl.store(lse + head * n + query, largest + tl.log(total), mask=present)


def merge_parts(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Make (o, lse) the softmax over the keys of both; each part has attended to some key.

    Args:
        o, part: [num_heads, n, head_dim], normalised; any strides but a unit stride in the last
            dimension. Where there are many parts, o had best be float32.
        lse, part_lse: float32 [num_heads, n], natural log.
    """
    check_dtype("o", o)
    num_heads, n, head_dim = o.shape
    check_dtype("part", part)
    if part.shape != o.shape:
        raise ValueError(f"part must be {list(o.shape)}, got {list(part.shape)}")
    for name, x in (("o", o), ("part", part)):
        if x.stride(2) != 1:
            raise ValueError(f"rows of {name} must be contiguous, got strides {x.stride()}")
    check_tensor("lse", lse, (num_heads, n), torch.float32, o.device)
    check_tensor("part_lse", part_lse, (num_heads, n), torch.float32, o.device)
    operands = (o, lse, part, part_lse)
    if not runs_kernel(o):
        return merge_parts_reference(*operands)
    merge_parts_kernel[(-(-n // _QUERIES), num_heads)](
        *operands,
        n,
        *o.stride()[:2],
        *part.stride()[:2],
        head_dim,
        next_power_of_2(head_dim),
        _QUERIES,
        num_warps=4,
    )


def merge_parts_reference(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge_parts` by torch."""
    merged = torch.logaddexp(lse, part_lse)
    weight, part_weight = ((x - merged).exp()[..., None] for x in (lse, part_lse))
    o.copy_(o * weight + part * part_weight)
    lse.copy_(merged)
