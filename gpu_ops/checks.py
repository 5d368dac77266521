"""What the operators' wrappers check before a kernel gets bare addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_dtype(name: str, x: Tensor) -> None:
    """ValueError unless `x` has a dtype the kernels take."""
    if x.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"{name} must have one of the dtypes {known}, got {x.dtype}")


def check_tensor(
    name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """ValueError unless `x` is contiguous, of this shape and dtype, on `device`."""
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    _check_layout(name, x, shape, dtype)


def check_reachable(
    name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """As `check_tensor`, for what may also be pinned host memory when `device` is a GPU."""
    if x.device != device and not (x.device.type == "cpu" and x.is_pinned()):
        raise ValueError(f"{name} must be on {device} or in pinned host memory, got {x.device}")
    _check_layout(name, x, shape, dtype)


def check_heads(name: str, x: Tensor, num_heads: int, multiple: int) -> None:
    """ValueError unless the query heads of `x` share their KV heads evenly."""
    if multiple < 1 or num_heads % multiple:
        raise ValueError(f"{name} has {num_heads} heads, not a multiple of {multiple} KV heads")


def _check_layout(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if x.shape != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
