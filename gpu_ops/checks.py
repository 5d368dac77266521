"""What the operators' wrappers check before a kernel gets bare addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_ops.row_format import row_items

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIM_MULTIPLE = 16
_MIN_PAGE_TOKENS = 16  # tensor cores multiply tiles of 16 keys


def check_dtype(name: str, x: Tensor) -> None:
    """ValueError unless `x` has a dtype the kernels take."""
    if x.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"{name} must have one of the dtypes {known}, got {x.dtype}")


def check_dims(name: str, x: Tensor, dims: str) -> None:
    """ValueError unless `x` has as many dimensions as `dims` names, like "[n, head_dim]"."""
    if x.dim() != dims.count(",") + 1:
        raise ValueError(f"{name} must be {dims}, got {list(x.shape)}")


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


def check_rows(name: str, x: Tensor, shape: Sequence[int], head_dim: int, like: Tensor) -> None:
    """As `check_tensor`, for rows [*shape, row] of `head_dim` numbers: of the dtype and on the
    device of `like`, or of int8 there."""
    dtype = x.dtype if x.dtype == torch.int8 else like.dtype
    check_tensor(name, x, (*shape, row_items(head_dim, dtype)), dtype, like.device)


def check_row_dtype(name: str, x: Tensor) -> None:
    """ValueError unless rows `x` may have this dtype."""
    if x.dtype != torch.int8:
        check_dtype(name, x)


def check_group(num_qo_heads: int, num_kv_heads: int) -> int:
    """The query heads that share a KV head; ValueError unless all KV heads have as many."""
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads must be a multiple of num_kv_heads,"
            f" got {num_qo_heads} and {num_kv_heads}"
        )
    return num_qo_heads // num_kv_heads


def check_head_dim(head_dim: int) -> None:
    """ValueError unless a kernel's row of head_dim elements can be loaded in whole vectors."""
    if head_dim < HEAD_DIM_MULTIPLE or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE}, got {head_dim}")


def check_latent_dim(latent_dim: int, head_dim: int) -> None:
    """ValueError unless keys of head_dim elements can begin with values of so many, or 0."""
    if not 0 <= latent_dim <= head_dim:
        raise ValueError(f"latent_dim must be in [0, {head_dim}], got {latent_dim}")


def num_parts(latent_dim: int) -> int:
    """Of pages and windows: keys and values, or keys alone where they begin with their values."""
    return 1 if latent_dim else 2


def check_sinks(sinks: Tensor | None, num_qo_heads: int, device: torch.device) -> None:
    """ValueError unless `sinks` are None or one float32 of each query head, on `device`."""
    if sinks is not None:
        check_tensor("sinks", sinks, (num_qo_heads,), torch.float32, device)


def check_rotary_dim(cos: Tensor, head_dim: int) -> int:
    """Elements of a head that tables [n, rotary_dim] rotate; ValueError unless they are some pairs
    of its head_dim."""
    rotary_dim = cos.shape[-1]
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(f"cos and sin must be of 2 to {head_dim} elements, even, got {rotary_dim}")
    return int(rotary_dim)


def check_gate(gate: str) -> bool:
    """Whether the activation of a gate is "gelu_tanh" and not "silu"; ValueError for another."""
    if gate not in ("silu", "gelu_tanh"):
        raise ValueError(f"gate must be 'silu' or 'gelu_tanh', got {gate!r}")
    return gate != "silu"


def check_page_tokens(page_tokens: int) -> None:
    """ValueError unless pages are powers of two that the kernels' tiles of tokens fit in."""
    if page_tokens < _MIN_PAGE_TOKENS or page_tokens & (page_tokens - 1):
        raise ValueError(
            f"page_tokens must be a power of two of at least {_MIN_PAGE_TOKENS}, got {page_tokens}"
        )


def _check_layout(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if x.shape != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
