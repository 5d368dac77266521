"""float64 references of the CPU kernels, written for clarity; every kernel is tested so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


def attention(
    query: Float64s,
    keys: Float64s,
    values: Float64s,
    *,
    sm_scale: float,
    softcap: float = 0.0,
    selection: Sequence[Sequence[int]] | None = None,
) -> tuple[Float64s, Float64s, list[Float64s]]:
    """Decode attention of one query token.

    Args:
        query: [num_qo_heads, head_dim].
        keys, values: [num_kv_heads, kv_len, head_dim].
        selection: token indices per KV head or per query head; None attends to all tokens.

    Returns:
        o [num_qo_heads, head_dim], lse [num_qo_heads] (natural log), and the attention weights of
        each query head over its tokens. An empty selection gives o = 0 and lse = -inf.
    """
    num_qo_heads, head_dim = query.shape
    num_kv_heads = len(keys)
    group_size = num_qo_heads // num_kv_heads
    out = np.zeros((num_qo_heads, head_dim))
    lse = np.full(num_qo_heads, -np.inf)
    weights: list[Float64s] = []
    for head in range(num_qo_heads):
        kv_head = head // group_size
        rows: slice | Int64s = slice(None)
        if selection is not None:
            rows = np.asarray(selection[head * len(selection) // num_qo_heads], np.int64)
            if len(rows) == 0:
                weights.append(np.zeros(0))
                continue
        scores = keys[kv_head, rows] @ query[head] * sm_scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        highest = scores.max()
        exp = np.exp(scores - highest)
        lse[head] = highest + np.log(exp.sum())
        weights.append(exp / exp.sum())
        out[head] = weights[-1] @ values[kv_head, rows]
    return out, lse, weights


def merge_softmax(
    o_a: Float64s, lse_a: Float64s, o_b: Float64s, lse_b: Float64s
) -> tuple[Float64s, Float64s]:
    """Merge two partial softmaxes: o [..., head_dim], lse [...] (natural log)."""
    lse = np.logaddexp(lse_a, lse_b)
    weight_a = np.exp(lse_a - lse)[..., None]
    weight_b = np.exp(lse_b - lse)[..., None]
    return o_a * weight_a + o_b * weight_b, lse


def rms_norm(x: Float64s, weight: Float64s, eps: float) -> Float64s:
    """RMSNorm over the last dimension."""
    inverse = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return np.asarray(x * inverse * weight)


def silu_mul(gate: Float64s, up: Float64s) -> Float64s:
    """SwiGLU's elementwise part: silu(gate) * up."""
    return gate / (1.0 + np.exp(-gate)) * up


def rope(x: Float64s, cos: Float64s, sin: Float64s) -> Float64s:
    """Rotary embedding, half-split layout: x cos + rotate_half(x) sin over [..., head_dim]."""
    half = x.shape[-1] // 2
    rotated = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * cos + rotated * sin


def top_k(x: Float64s, k: int) -> npt.NDArray[np.int64]:
    """Ascending positions of the k largest; equal values prefer lower positions."""
    order = np.lexsort((np.arange(len(x)), -x))
    return np.sort(order[:k])


def chunk_means(keys: Float64s, starts: Int64s) -> Float64s:
    """Unit-length means of rows starts[i] to starts[i + 1] of each head."""
    sums = np.add.reduceat(keys[:, : starts[-1]], starts[:-1], axis=1)
    norms = np.linalg.norm(sums, axis=2, keepdims=True)
    return np.asarray(np.where(norms > 0, sums / np.where(norms > 0, norms, 1), 0))


def normalized_means(points: Float64s, labels: Int64s, num_clusters: int) -> Float64s:
    """Unit-length mean of the points [n, width] of each label: a step of spherical k-means."""
    sums = np.zeros((num_clusters, points.shape[1]))
    np.add.at(sums, labels, points)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.asarray(np.where(norms > 0, sums / np.where(norms > 0, norms, 1), 0))


def spherical_kmeans(
    points: Float64s, num_clusters: int, iterations: int
) -> tuple[Int64s, Float64s]:
    """Labels [n] and centroids of one head's points [n, width]."""
    n = len(points)
    centroids = points[np.arange(num_clusters) * n // num_clusters]
    labels = np.full(n, -1)
    for _ in range(iterations):
        products = points @ centroids.T
        labels = products.argmax(axis=1)
        counts = np.bincount(labels, minlength=num_clusters)
        worst = iter(np.argsort(products.max(axis=1), kind="stable"))
        for empty in np.flatnonzero(counts == 0):
            point = next(p for p in worst if counts[labels[p]] > 1)
            counts[labels[point]] -= 1
            labels[point] = empty
            counts[empty] = 1
        centroids = normalized_means(points, labels, num_clusters)
    return labels, centroids
