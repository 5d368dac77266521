"""Checked calls into the C++ kernels (`cpp/`, built as `cpu_ops._native`).

The wrappers check devices, dtypes, shapes and strides and pass addresses; the kernels compute. All
tensors are torch CPU tensors of one dtype: float32, float16 or bfloat16. `OFFLOAD_ISA` forces an
instruction set and is refused if the CPU lacks it.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
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


def _rows(name: str, x: Tensor, columns: int, dtype: torch.dtype) -> None:
    """Check that x is a contiguous CPU matrix of `columns` columns."""
    # On the hot path: one cheap test, and the questions only if it fails.
    fits = x.dtype is dtype and x.is_cpu and x.dim() == 2 and x.shape[1] == columns
    if fits and x.is_contiguous():
        return
    if x.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {x.device}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"{name} must be [n, {columns}], got {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


def page_shift(page_tokens: int) -> int:
    """log2 of page_tokens; ValueError unless it is a power of two."""
    if page_tokens < 1 or page_tokens & (page_tokens - 1):
        raise ValueError(f"page_tokens must be a power of two, got {page_tokens}")
    return page_tokens.bit_length() - 1


def check_head_dim(head_dim: int) -> None:
    """ValueError unless the kernels take head_dim."""
    if head_dim % _native.HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a multiple of {_native.HEAD_DIM_MULTIPLE}"
            f" up to {MAX_HEAD_DIM}, got {head_dim}"
        )


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    page_tables: npt.NDArray[np.int64],
    table_strides: npt.NDArray[np.int64],
    layer_idx: int,
    positions: npt.NDArray[np.int64],
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    isa: str | None = None,
) -> None:
    """Rotate q and k, and write each row's k and v into its page of the host KV store.

    Args:
        qkv: [n, (num_qo_heads + 2 num_kv_heads) * head_dim]; the query heads are rotated in place.
        cos, sin: [n, head_dim], in qkv's dtype.
        page_tables: int64 [n], addresses of `KVStore.page_table(seq)` of each row's sequence.
        table_strides: int64 [n], pages per layer in those tables.
        positions: int64 [n], the token slot each row is written to (its page must be reserved).
        q_norm, k_norm: RMSNorm weights [head_dim] applied per head before the rotation (Qwen3).
    """
    n = qkv.shape[0]
    _rows("qkv", qkv, (num_qo_heads + 2 * num_kv_heads) * head_dim, qkv.dtype)
    check_head_dim(head_dim)
    for name, x in (("cos", cos), ("sin", sin)):
        _rows(name, x, head_dim, qkv.dtype)
        if x.shape[0] != n:
            raise ValueError(f"{name} must have {n} rows, got {x.shape[0]}")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.dtype != qkv.dtype or weight.numel() != head_dim):
            raise ValueError(f"{name} must be {qkv.dtype} [{head_dim}], got {list(weight.shape)}")
    if not len(page_tables) == len(table_strides) == len(positions) == n:
        raise ValueError(
            f"expected {n} page tables, strides and positions,"
            f" got {len(page_tables)}, {len(table_strides)}, {len(positions)}"
        )
    _native.rope_append(
        isa or isa_name(),
        dtype_code(qkv.dtype),
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_shift(page_tokens),
        page_tables,
        table_strides,
        layer_idx,
        positions,
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        norm_eps,
    )


def top_k(x: Tensor, k: int, *, isa: str | None = None) -> npt.NDArray[np.int32]:
    """Positions of the k largest of x (float32 [n]), ascending; equal values prefer lower ones."""
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous float32 vector, got {x.dtype} {list(x.shape)}")
    return _native.top_k(isa or isa_name(), x.data_ptr(), x.numel(), k)
