"""Checked calls into the C++ kernels (`cpp/`, built as `cpu_ops._native`).

The wrappers check devices, dtypes, shapes and strides and pass addresses; the kernels compute. All
tensors are torch CPU tensors of one dtype: float32, float16 or bfloat16. `OFFLOAD_ISA` forces an
instruction set and is refused if the CPU lacks it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native

T = TypeVar("T")

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INT8_ROWS = 3  # the kernels' code of int8 keys and values
MAX_GROUP_SIZE = _native.MAX_GROUP_SIZE
MAX_HEAD_DIM = _native.MAX_HEAD_DIM
MAX_LINEAR_ROWS = _native.MAX_LINEAR_ROWS
NO_ARRAYS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@functools.cache
def isa_name() -> str:
    """The instruction set the kernels use in this process.

    Raises:
        ValueError: OFFLOAD_ISA names an ISA that is unknown or that this CPU lacks.
    """
    return _native.default_isa()


def available_isas() -> list[str]:
    """ISAs this build and CPU can run, least capable first."""
    return _native.available_isas()


def known_isas() -> list[str]:
    """All ISAs the source knows, whether or not they run here."""
    return _native.known_isas()


def dtype_code(dtype: torch.dtype) -> int:
    """Index of `dtype` in the kernel tables; ValueError if no kernel takes it."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        names = ", ".join(str(known) for known in DTYPE_CODES)
        raise ValueError(f"dtype must be one of {names}, got {dtype}")
    return code


def check_tensor(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """ValueError unless x is contiguous on the CPU, of that shape and dtype."""
    fits = x.dtype is dtype and x.is_cpu and x.shape == tuple(shape)
    if not fits or not x.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on the CPU, contiguous,"
            f" got {x.dtype} {list(x.shape)} on {x.device} with strides {x.stride()}"
        )


def page_shift(page_tokens: int) -> int:
    """log2 of page_tokens; ValueError unless it is a power of two."""
    if page_tokens < 1 or page_tokens & (page_tokens - 1):
        raise ValueError(f"page_tokens must be a power of two, got {page_tokens}")
    return page_tokens.bit_length() - 1


def of_layers(num_layers: int, name: str, value: T | Sequence[T]) -> tuple[T, ...]:
    """`value` of each layer; ValueError for another number of layers."""
    of_layers = tuple(value) if isinstance(value, Sequence) else (value,) * num_layers
    if len(of_layers) != num_layers:
        raise ValueError(f"expected {num_layers} {name}, got {len(of_layers)}")
    return of_layers


def check_head_dim(head_dim: int) -> None:
    """ValueError unless the kernels take head_dim."""
    if head_dim % _native.HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a multiple of {_native.HEAD_DIM_MULTIPLE}"
            f" up to {MAX_HEAD_DIM}, got {head_dim}"
        )


def check_rotary_dim(rotary_dim: int, head_dim: int) -> int:
    """`rotary_dim`; ValueError unless it is even and no more than head_dim."""
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"cos and sin must have an even number of elements up to {head_dim}, got {rotary_dim}"
        )
    return rotary_dim


def top_mass(x: Tensor, positions: npt.NDArray[np.int32], mass: float) -> npt.NDArray[np.int32]:
    """The fewest of ascending `positions` into x (float32 [n]) whose values sum to `mass`: the
    largest, equal ones by lower positions. All where they do not sum to it.
    """
    check_tensor("x", x, (x.numel(),), torch.float32)
    if len(positions) and not 0 <= positions[0] <= positions[-1] < x.numel():
        raise ValueError(f"positions must lie in [0, {x.numel()}), got {positions}")
    kept = positions.astype(np.int32)
    return kept[: _native.top_mass(x.data_ptr(), kept, mass)]


def top_k(x: Tensor, k: int, *, isa: str | None = None) -> npt.NDArray[np.int32]:
    """Positions of the k largest of x (float32 [n]), ascending; equal values prefer lower ones."""
    check_tensor("x", x, (x.numel(),), torch.float32)
    return _native.top_k(isa or isa_name(), x.data_ptr(), x.numel(), k)
