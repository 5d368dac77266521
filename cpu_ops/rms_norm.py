"""RMSNorm of many rows, for prompts on a CPU: torch's way there makes eight passes over them."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import check_tensor, dtype_code, isa_name
from cpu_ops.worker_pool import WorkerPool


def rms_norm(
    pool: WorkerPool, x: Tensor, weight: Tensor, eps: float, *, isa: str | None = None
) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension, rounded as transformers does it.

    Args:
        x: [..., width] on the CPU, contiguous.
        weight: [width].
    """
    code, width = dtype_code(x.dtype), x.shape[-1]
    check_tensor("x", x, x.shape, x.dtype)
    check_tensor("weight", weight, (width,), x.dtype)
    out = torch.empty_like(x)
    _native.rms_norm(
        pool.native,
        isa or isa_name(),
        code,
        x.data_ptr(),
        weight.data_ptr(),
        eps,
        x.numel() // width,
        width,
        out.data_ptr(),
    )
    return out
