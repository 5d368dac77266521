"""The token that leaves the window next joins the cluster of its key, whose means follow.

As cpp/attention/estimate.cpp does it on the CPU; the clusters are those of
offload/selection/estimate.py. It is the last launch of a layer: until the next step nothing asks
for the token, which is still in the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_dims, check_head_dim, check_rows, check_tensor
from gpu_ops.choose_places import HotMap
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.load_rows import load_row
from gpu_ops.row_format import as_numbers

_NO_CLUSTER = 255


@jit
def grow_clusters_kernel(
    window: tl.tensor,
    positions: tl.tensor,
    heads: tl.tensor,
    means: tl.tensor,
    cluster_of: tl.tensor,
    counts: tl.tensor,
    first_head: tl.tensor,
    num_mapped: tl.tensor,
    max_tokens: tl.tensor,
    PARTS: tl.constexpr,  # of the window; 1: keys alone, which are the values
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_CLUSTERS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    RECENT_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_ITEMS: tl.constexpr,
    NO_CLUSTER: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program per head and row."""
    slot, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_head, c, d = tl.load(heads + slot), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    of_map = row * num_mapped + first_head + slot
    token = tl.load(positions + row).to(tl.int32) + 1 - RECENT_TOKENS
    joins = (token >= SINK_TOKENS) & (token < max_tokens)  # an inactive row's position is -1
    cluster_of += of_map * max_tokens + token
    joins &= tl.load(cluster_of, mask=joins, other=0) == NO_CLUSTER
    counts += of_map * NUM_CLUSTERS
    count = tl.load(counts + c, mask=(c < NUM_CLUSTERS) & joins, other=0)
    joins &= tl.sum(count, 0) > 0

    place = SINK_TOKENS + (token - SINK_TOKENS) % RECENT_TOKENS
    inside = (d < HEAD_DIM) & joins
    of_window = (row * PARTS * NUM_KV_HEADS + kv_head) * (SINK_TOKENS + RECENT_TOKENS) + place
    side = (PARTS - 1) * NUM_KV_HEADS * (SINK_TOKENS + RECENT_TOKENS)
    window += of_window * ROW_ITEMS
    key = load_row(window, d, inside, HEAD_DIM, ROW_ITEMS)
    value = load_row(window + side * ROW_ITEMS, d, inside, HEAD_DIM, ROW_ITEMS)
    means += (row * 2 * NUM_HEADS + slot) * NUM_CLUSTERS * HEAD_DIM
    exists = count > 0
    rows = means + c[:, None] * HEAD_DIM + d[None, :]
    mean_keys = tl.load(rows, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
    norms = tl.sqrt(tl.sum(mean_keys * mean_keys, 1))
    cosines = tl.sum(mean_keys * key[None, :], 1) / tl.where(norms > 0, norms, 1.0)
    best = tl.argmax(tl.where(exists, cosines, float("-inf")), 0)
    num = tl.sum(tl.where(c == best, count, 0), 0) + 1

    share = 1.0 / num.to(tl.float32)
    to_key = means + best * HEAD_DIM + d
    to_value = to_key + NUM_HEADS * NUM_CLUSTERS * HEAD_DIM
    old_key = tl.load(to_key, mask=inside, other=0.0).to(tl.float32)
    old_value = tl.load(to_value, mask=inside, other=0.0).to(tl.float32)
    new_key = old_key + share * (key - old_key)
    new_value = old_value + share * (value - old_value)
    tl.store(to_key, new_key.to(means.dtype.element_ty), mask=inside)
    tl.store(to_value, new_value.to(means.dtype.element_ty), mask=inside)
    tl.store(counts + best, num, mask=joins)
    tl.store(cluster_of, best.to(tl.uint8), mask=joins)


def grow_clusters(
    window: Tensor,
    positions: Tensor,
    heads: Tensor,
    means: Tensor,
    hot_map: HotMap,
    *,
    first_head: int,
    sink_tokens: int,
    recent_tokens: int,
) -> None:
    """Have each row's oldest token of the window, which the next step's takes the place of, in the
    cluster whose mean key is nearest by the cosine. Where there are no clusters nothing happens,
    nor where the token is in one: a step may be taken again.

    Args:
        window: [n, 2, num_kv_heads, sink_tokens + recent_tokens, row], as of
            `window_attention`, the step's own token included; of keys alone they are the values.
        positions: int64 [n], each row's last token; -1 for an inactive row.
        heads: int32 [num_heads], of a layer, whose first is `first_head` of the map's.
        means: [n, 2, num_heads, clusters, head_dim], keys and values; changed.
        hot_map: of n slots; `cluster_of` and `cluster_counts` change.

    Raises:
        ValueError: operands that do not fit together.
    """
    check_dims("window", window, "[n, 2, num_kv_heads, window_tokens, row]")
    n, parts, num_kv_heads, _, row_items = window.shape
    head_dim = means.shape[-1]
    check_head_dim(head_dim)
    device, num_heads = window.device, heads.shape[0]
    of_window = (n, parts, num_kv_heads, sink_tokens + recent_tokens)
    check_rows("window", window, of_window, head_dim, means)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("heads", heads, (num_heads,), torch.int32, device)
    _, num_mapped, clusters = hot_map.cluster_counts.shape
    max_tokens = hot_map.cluster_of.shape[2]
    check_tensor("means", means, (n, 2, num_heads, clusters, head_dim), means.dtype, device)
    mapped = (n, num_mapped)
    check_tensor("cluster_of", hot_map.cluster_of, (*mapped, max_tokens), torch.uint8, device)
    check_tensor("cluster_counts", hot_map.cluster_counts, (*mapped, clusters), torch.int32, device)
    if recent_tokens < 1 or not 0 <= first_head <= num_mapped - num_heads:
        raise ValueError(
            f"recent_tokens must be at least 1 and first_head in [0, {num_mapped - num_heads}], "
            f"got {recent_tokens} and {first_head}"
        )
    operands = (window, positions, heads, means)
    if not runs_kernel(window):
        return grow_clusters_reference(*operands, hot_map, first_head, sink_tokens, recent_tokens)
    grow_clusters_kernel[(num_heads, n)](
        *operands,
        hot_map.cluster_of,
        hot_map.cluster_counts,
        first_head,
        num_mapped,
        max_tokens,
        parts,
        num_heads,
        num_kv_heads,
        clusters,
        sink_tokens,
        recent_tokens,
        head_dim,
        row_items,
        _NO_CLUSTER,
        next_power_of_2(clusters),
        next_power_of_2(head_dim),
        num_warps=4,
    )


def grow_clusters_reference(
    window: Tensor,
    positions: Tensor,
    heads: Tensor,
    means: Tensor,
    hot_map: HotMap,
    first_head: int,
    sink_tokens: int,
    recent_tokens: int,
) -> None:
    """`grow_clusters` by torch."""
    for row, position in enumerate(positions.tolist()):
        token = position + 1 - recent_tokens
        if not sink_tokens <= token < hot_map.cluster_of.shape[2]:
            continue
        place = sink_tokens + (token - sink_tokens) % recent_tokens
        for i, head in enumerate(heads.tolist()):
            counts = hot_map.cluster_counts[row, first_head + i]
            cluster_of = hot_map.cluster_of[row, first_head + i]
            if not int(counts.sum()) or int(cluster_of[token]) != _NO_CLUSTER:
                continue
            pair = as_numbers(window[row, :, head, place], means.shape[-1])
            held = means[row, :, i].float()
            norms = held[0].norm(dim=-1)
            cosines = held[0] @ pair[0] / norms.masked_fill(norms == 0, 1.0)
            best = int(cosines.masked_fill(counts == 0, float("-inf")).argmax())
            counts[best] += 1
            new = held[:, best] + (pair - held[:, best]) / counts[best]
            means[row, :, i, best] = new.to(means.dtype)
            cluster_of[token] = best
