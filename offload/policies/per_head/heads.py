"""How many KV heads of a model may retrieve, and which ones where nothing is known of them."""

from __future__ import annotations

import numpy as np

from offload.selection.head_roles import BoolArray

_DEFAULT, _MOST = 8, 6  # one in so many of a model's KV heads


def default_retrieval_heads(num_layers: int, num_kv_heads: int, dense_layers: int) -> int:
    """An eighth of the model's KV heads, as far as there are so many after the dense layers."""
    sparse = max(0, num_layers - dense_layers) * num_kv_heads
    return min(num_layers * num_kv_heads // _DEFAULT, sparse)


def check_retrieval_heads(
    retrieval_heads: int,
    num_layers: int,
    num_kv_heads: int,
    dense_layers: int,
    remedy: str = "lower retrieval_heads, or give other head_roles",
) -> None:
    """Refuse more retrieval heads than a sixth of the KV heads, or than sparse layers have."""
    if not isinstance(retrieval_heads, int) or isinstance(retrieval_heads, bool):
        raise ValueError(f"retrieval_heads must be an int, got {retrieval_heads!r}")
    num_heads = num_layers * num_kv_heads
    sparse = max(0, num_layers - dense_layers) * num_kv_heads
    most = min(-(-num_heads // _MOST), sparse)
    if not 0 <= retrieval_heads <= most:
        raise ValueError(
            f"per_head: {retrieval_heads} retrieval heads after the first {dense_layers} layers, "
            f"but at most {most} may retrieve, a sixth of this model's {num_heads} KV heads: they "
            f"look at everything; {remedy}"
        )


def spaced_heads(
    num_layers: int, num_kv_heads: int, dense_layers: int, retrieval_heads: int | None
) -> BoolArray:
    """bool [num_layers, num_kv_heads]: at equal distances over the layers after the dense ones,
    KV heads in turn.
    """
    count = retrieval_heads
    if count is None:
        count = default_retrieval_heads(num_layers, num_kv_heads, dense_layers)
    retrieves = np.zeros((num_layers, num_kv_heads), np.bool_)
    if count:
        step = (num_layers - dense_layers) / count
        layers = dense_layers + ((np.arange(count) + 0.5) * step).astype(int)
        retrieves[layers, np.arange(count) % num_kv_heads] = True
    return retrieves
