"""Exact causal attention of many queries, for prompts on a CPU (causal_attention.cpp).

Of bfloat16 by tiles where the CPU has AMX, or by dot products where it has AVX512-BF16, else in
float32 whatever the dtype. torch's own takes its products from MKL, which makes a fifth of what an
AMD's AVX512-BF16 can, and converts 16-bit numbers anew for each block of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import DTYPE_CODES, check_tensor, isa_name
from cpu_ops.worker_pool import WorkerPool


def has_causal_attention(dtype: torch.dtype, head_dim: int, *, isa: str | None = None) -> bool:
    """Whether `causal_attention` takes such heads on this CPU."""
    code = DTYPE_CODES.get(dtype)
    return code is not None and _native.has_causal_attention(isa or isa_name(), code, head_dim)


def causal_attention(
    pool: WorkerPool,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sm_scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    isa: str | None = None,
) -> Tensor:
    """Attention of the last n tokens of `keys` and `values`, each over those up to itself.

    Args:
        q: [num_qo_heads, n, head_dim].
        keys, values: [num_kv_heads, kv_len, head_dim] with kv_len >= n, of the same strides.
            Unit stride in the last dimension, as in q.
        window: how many tokens each sees, itself the last of them; 0: all.
        sinks: float32 [num_qo_heads], logits that join each softmax and have no value; or None.

    Returns:
        [n, num_qo_heads, head_dim].

    Raises:
        ValueError: for other shapes, or where `has_causal_attention` is false.
    """
    num_qo_heads, n, head_dim = q.shape
    num_kv_heads, kv_len, _ = keys.shape
    if not has_causal_attention(q.dtype, head_dim, isa=isa):
        raise ValueError(f"no kernel for {q.dtype} and head_dim {head_dim} on {isa or isa_name()}")
    skipped = num_kv_heads == 1  # torch leaves any stride to the only head
    same = keys.shape == values.shape and keys.stride()[skipped:] == values.stride()[skipped:]
    fits = keys.shape[2] == head_dim and 1 <= n <= kv_len
    fits = fits and 1 <= num_kv_heads <= num_qo_heads and num_qo_heads % num_kv_heads == 0
    is_row = q.stride(2) == keys.stride(2) == 1
    given = (q, keys, values)
    is_alike = all(x.is_cpu and x.dtype is q.dtype for x in given)
    if not (same and fits and is_row and is_alike):
        raise ValueError(
            "expected q [num_qo_heads, n, head_dim] and keys and values [num_kv_heads, kv_len,"
            " head_dim] alike, on the CPU,"
            f" got {[(x.dtype, list(x.shape), x.stride(), str(x.device)) for x in given]}"
        )
    if sinks is not None:
        check_tensor("sinks", sinks, (num_qo_heads,), torch.float32)
    out = q.new_empty(n, num_qo_heads, head_dim)
    _native.causal_attention(
        pool.native,
        isa or isa_name(),
        DTYPE_CODES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        n,
        num_qo_heads // num_kv_heads,
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        keys.stride(1),
        kv_len,
        num_kv_heads,
        head_dim,
        sm_scale,
        window,
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
    )
    return out
