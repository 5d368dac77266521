"""Checked calls into the C++ kernels (`cpp/`, built as `cpu_ops._native`).

The wrappers check devices, dtypes, shapes and strides and pass addresses; the kernels compute. All
tensors are torch CPU tensors of one dtype: float32, float16 or bfloat16. `OFFLOAD_ISA` forces an
instruction set and is refused if the CPU lacks it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native

if TYPE_CHECKING:
    from offload.attention import DecodeAttention

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MAX_GROUP_SIZE = _native.MAX_GROUP_SIZE
MAX_HEAD_DIM = _native.MAX_HEAD_DIM
MAX_LINEAR_ROWS = _native.MAX_LINEAR_ROWS
MAX_POLICY_ARRAYS = _native.MAX_POLICY_ARRAYS
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


class WorkerPool:
    """Threads that run kernels; the calling thread is one of them.

    Args:
        num_threads: workers including the caller; None takes the CPUs this process may use
            (cpuset and cgroup quota).
        spin_us: how long idle workers spin before they sleep.
    """

    def __init__(self, num_threads: int | None = None, spin_us: int = 500) -> None:
        if num_threads is None:
            from offload.memory import available_cpus

            num_threads = available_cpus()
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if spin_us < 0:
            raise ValueError(f"spin_us must not be negative, got {spin_us}")
        self.native = _native.WorkerPool(num_threads, spin_us)

    @property
    def num_threads(self) -> int:
        return self.native.num_threads

    def close(self) -> None:
        """End the threads. Later calls run on the caller alone."""
        self.native.close()


class Linear:
    """y = f(x) @ concat(weights).T + concat(biases) (+ residual), for up to `max_rows` rows of x.

    f is RMSNorm (`norm`), SwiGLU (`silu_mul`) or nothing. Values are rounded to the dtype where
    transformers rounds: after the norm, the gate, the product, the projection and the sum.

    Args:
        weights: matrices [out_i, in] of one dtype, contiguous; kept by reference, not copied.
        biases: one [out_i] or None per weight.
        isa: an ISA other than the process's (tests).
    """

    max_rows = MAX_LINEAR_ROWS

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        *,
        isa: str | None = None,
    ) -> None:
        if not weights:
            raise ValueError("weights must not be empty")
        biases = [None] * len(weights) if biases is None else list(biases)
        if len(biases) != len(weights):
            raise ValueError(f"expected {len(weights)} biases, got {len(biases)}")
        self.dtype = weights[0].dtype
        self.in_features = int(weights[0].shape[-1])
        code = dtype_code(self.dtype)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            _rows(f"weights[{i}]", weight, self.in_features, self.dtype)
            if bias is not None:
                _rows(f"biases[{i}]", bias.unsqueeze(0), int(weight.shape[0]), self.dtype)
        self.isa = isa or isa_name()
        self._kept = (list(weights), biases)
        sizes = [int(weight.shape[0]) for weight in weights]
        self.out_features = sum(sizes)
        self.native = _native.Linear(
            code,
            self.in_features,
            [weight.data_ptr() for weight in weights],
            [0 if bias is None else bias.data_ptr() for bias in biases],
            sizes,
        )

    def __call__(
        self,
        pool: WorkerPool,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        silu_mul: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Run on x [n, in_features], or [n, 2 * in_features] = gate ++ up with `silu_mul`.

        Args:
            out: [n, out_features], made if None; may be `residual` itself.
            norm: (weight [in_features], eps) of an RMSNorm applied to x first.
            residual: [n, out_features], added last.
        """
        num_rows = x.shape[0]
        if not 1 <= num_rows <= self.max_rows:
            raise ValueError(f"x must have 1 to {self.max_rows} rows, got {num_rows}")
        _rows("x", x, self.in_features * (2 if silu_mul else 1), self.dtype)
        norm_weight, norm_eps = 0, 0.0
        if norm is not None:
            if silu_mul:
                raise ValueError("norm and silu_mul exclude each other")
            weight, norm_eps = norm
            if weight.dtype != self.dtype or weight.numel() != self.in_features:
                raise ValueError(
                    f"norm weight must be {self.dtype} [{self.in_features}],"
                    f" got {weight.dtype} {list(weight.shape)}"
                )
            norm_weight = weight.data_ptr()
        if out is None:
            out = torch.empty(num_rows, self.out_features, dtype=self.dtype)
        for name, y in (("out", out), ("residual", residual)):
            if y is None:
                continue
            _rows(name, y, self.out_features, self.dtype)
            if y.shape[0] != num_rows:
                raise ValueError(f"{name} must have {num_rows} rows, got {y.shape[0]}")
        self.native.run(
            pool.native,
            self.isa,
            x.data_ptr(),
            num_rows,
            norm_weight,
            norm_eps,
            silu_mul,
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out


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


def measure_read_bandwidth(
    pool: WorkerPool, buffer: Tensor, *, repeats: int = 5, isa: str | None = None
) -> float:
    """Median bytes per second of reading `buffer` once, in order, on all threads of the pool."""
    num_bytes = buffer.numel() * buffer.element_size()
    times = [
        _native.time_sequential_read(pool.native, isa or isa_name(), buffer.data_ptr(), num_bytes)
        for _ in range(repeats)
    ]
    return num_bytes / float(np.median(times))


def measure_gather_bandwidth(
    pool: WorkerPool,
    buffer: Tensor,
    rows: npt.NDArray[np.int32],
    *,
    row_bytes: int = 256,
    repeats: int = 5,
    isa: str | None = None,
) -> float:
    """Median bytes per second of reading the given rows of `buffer`, in order, on all threads."""
    num_bytes = buffer.numel() * buffer.element_size()
    if len(rows) == 0 or int(rows.max()) >= num_bytes // row_bytes or int(rows.min()) < 0:
        raise ValueError(f"rows must lie in [0, {num_bytes // row_bytes}) and not be empty")
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    times = [
        _native.time_row_gather(pool.native, isa or isa_name(), buffer.data_ptr(), rows, row_bytes)
        for _ in range(repeats)
    ]
    return len(rows) * row_bytes / float(np.median(times))


def attend_csr(
    attention: DecodeAttention,
    query: Tensor,
    pages: npt.NDArray[np.int64],
    kv_len: int,
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend one query token to an explicit CSR selection of one layer's cache.

    Args:
        attention: names the shapes, the pool and the kernels; its policy is not used.
        query: [1, num_qo_heads * head_dim].
        pages: int64 [num_pages], a row of `KVStore.page_table(seq)`.
        indptr: [num_kv_heads + 1], or [num_qo_heads + 1] for a selection per query head.
        indices: sorted unique tokens of each CSR row, in [0, kv_len).
        return_weights: also return the attention weights of the selection.

    Returns:
        o [num_qo_heads, head_dim], lse float32 [num_qo_heads] (-inf for an empty row), and per
        query head the weights over its row's tokens ([] unless asked for).
    """
    heads, kv_heads = attention.num_qo_heads, attention.store.num_kv_heads
    head_dim = attention.store.head_dim
    _rows("query", query, heads * head_dim, attention.store.dtype)
    offsets = np.ascontiguousarray(indptr, np.int64)
    tokens = np.ascontiguousarray(indices, np.int64)
    num_rows = len(offsets) - 1
    if num_rows not in (kv_heads, heads):
        raise ValueError(
            f"indptr must have {kv_heads + 1} or {heads + 1} entries, got {len(offsets)}"
        )
    if offsets[0] != 0 or bool((np.diff(offsets) < 0).any()):
        raise ValueError("indptr must start at 0 and not decrease")
    if offsets[-1] != len(tokens):
        raise ValueError(f"indptr ends at {offsets[-1]} but there are {len(tokens)} indices")
    if not 0 <= kv_len <= len(pages) * attention.store.page_tokens:
        raise ValueError(f"kv_len must be in the given pages, got {kv_len}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < kv_len:
        raise ValueError(f"indices must lie in [0, {kv_len})")
    starts = np.zeros(len(tokens), bool)
    starts[offsets[:-1][offsets[:-1] < len(tokens)]] = True
    if len(tokens) > 1 and bool(((np.diff(tokens) <= 0) & ~starts[1:]).any()):
        raise ValueError("indices of each row must be sorted and unique")
    out = torch.empty(heads, head_dim, dtype=query.dtype)
    lse = torch.empty(heads, dtype=torch.float32)
    per_row = heads // num_rows
    flat = torch.empty(len(tokens) * per_row if return_weights else 0, dtype=torch.float32)
    attention.native_csr(
        query.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        int(pages.ctypes.data),
        kv_len,
        offsets,
        tokens.astype(np.int32),
        flat.data_ptr() if return_weights and len(tokens) else 0,
    )
    weights: list[Tensor] = []
    if return_weights:
        for row in range(num_rows):
            n = int(offsets[row + 1] - offsets[row])
            first = int(offsets[row]) * per_row
            weights += list(flat[first : first + n * per_row].view(per_row, n))
    return out, lse, weights
