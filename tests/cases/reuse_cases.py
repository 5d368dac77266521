"""A sequence through all layers of a cache under a policy that reuses selections."""

from __future__ import annotations

import numpy as np
import torch
from cases.attention_cases import TOLERANCE, Cache, random_queries, relative_error
from cases.seeded import new_rng

from offload.decode.attention import DecodeAttention

GROUP_SIZE, NUM_LAYERS = 3, 6


def make_case(
    dtype: torch.dtype = torch.float32, kv_len: int = 400, rows: int = 1
) -> tuple[Cache, list[torch.Tensor]]:
    """A cache, and the queries of each layer."""
    rng = new_rng()
    cache = Cache.random(rng, kv_len=kv_len, dtype=dtype, page_tokens=16, num_layers=NUM_LAYERS)
    return cache, [random_queries(rng, rows, 2 * GROUP_SIZE, 64, dtype) for _ in range(NUM_LAYERS)]


def step_through(
    cache: Cache, attention: DecodeAttention, queries: list[torch.Tensor], kv_lens: list[int]
) -> list[list[list[list[int]]]]:
    """One decode step; returns [layer][row][KV head] tokens, and checks what was attended.

    Args:
        queries: of each layer, [rows, num_qo_heads * head_dim].
    """
    num_heads, head_dim = cache.store.num_kv_heads, cache.store.head_dim
    step = attention.begin_step([cache.seq] * len(kv_lens), kv_lens)
    selections = []
    for layer_idx, query in enumerate(queries):
        out = torch.full_like(query, float("nan"))
        lse = torch.full((len(kv_lens), attention.num_qo_heads), float("nan"))
        attention.prepare(layer_idx, step)
        attention.attend(layer_idx, step, query, out, lse)
        flat = attention.last_selection()
        rows = [flat[i : i + num_heads] for i in range(0, len(flat), num_heads)]
        selections.append(rows)
        for row, kv_len in enumerate(kv_lens):
            if len(rows) < len(kv_lens):
                continue  # stateful policies run row by row: only the last selection is known
            attended = [np.array(tokens or range(kv_len)) for tokens in rows[row]]
            expected, expected_lse, _ = cache.reference(query[row : row + 1], layer_idx, attended)
            actual = out[row].double().numpy().reshape(-1, head_dim)
            assert relative_error(actual, expected) < TOLERANCE[cache.store.dtype]
            np.testing.assert_allclose(lse[row].double().numpy(), expected_lse, atol=2e-3)
    return selections


def importance_of(cache: Cache, query: torch.Tensor, layer_idx: int, kv_len: int) -> np.ndarray:
    """float64 [num_kv_heads, kv_len]: exact weights of a query row, summed over each group."""
    everything = [np.arange(kv_len)] * cache.store.num_kv_heads
    _, _, weights = cache.reference(query[None], layer_idx, everything)
    return np.stack(weights).reshape(cache.store.num_kv_heads, GROUP_SIZE, kv_len).sum(1)


def check_top_k(tokens: list[int], importance: np.ndarray, policy, count: int) -> None:
    """`count` tokens between sinks and recent window, the most important but for near-ties."""
    first, last = policy.sink_tokens, len(importance) - policy.recent_tokens
    assert tokens[:first] == list(range(first))
    assert tokens[len(tokens) - policy.recent_tokens :] == list(range(last, len(importance)))
    chosen = np.array(tokens[first : len(tokens) - policy.recent_tokens], int)
    assert len(chosen) == count
    assert (np.diff(chosen) > 0).all()
    if 0 < count < last - first:
        others = np.setdiff1d(np.arange(first, last), chosen)
        assert importance[others].max() <= importance[chosen].min() * (1 + 1e-3)
