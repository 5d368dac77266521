"""The rotary embedding of many tokens, for prompts on a CPU: torch's way makes six passes."""

from __future__ import annotations

from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import (
    check_head_dim,
    check_rotary_dim,
    check_tensor,
    dtype_code,
    isa_name,
)
from cpu_ops.worker_pool import WorkerPool


def rotate_heads(
    pool: WorkerPool,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    isa: str | None = None,
) -> Tensor:
    """x * cos + rotate_half(x) * sin of each head, rounded as transformers does it.

    Args:
        x: [n, num_heads, head_dim] on the CPU; the heads of a token are contiguous.
        cos, sin: [n, rotary_dim]; the other elements of a head, the last, stay as they are.

    Returns:
        [num_heads, n, head_dim], contiguous.

    Raises:
        ValueError: for other shapes, dtypes or strides.
    """
    n, num_heads, head_dim = x.shape
    check_head_dim(head_dim)
    if not x.is_cpu or x.stride()[1:] != (head_dim, 1):
        raise ValueError(
            "x must be [n, num_heads, head_dim] on the CPU, contiguous but for its tokens,"
            f" got {list(x.shape)} on {x.device} with strides {x.stride()}"
        )
    rotary_dim = check_rotary_dim(cos.shape[-1], head_dim)
    check_tensor("cos", cos, (n, rotary_dim), x.dtype)
    check_tensor("sin", sin, (n, rotary_dim), x.dtype)
    out = x.new_empty(num_heads, n, head_dim)
    _native.rotate_heads(
        pool.native,
        isa or isa_name(),
        dtype_code(x.dtype),
        x.data_ptr(),
        x.stride(0),
        n,
        num_heads,
        head_dim,
        rotary_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
    )
    return out
