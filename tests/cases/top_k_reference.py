"""Greedy tokens of transformers' modules, under `full` and under `exact_topk`."""

from __future__ import annotations

from typing import Any

import torch

from offload.policies import Policy
from offload.policies.exact_topk import ExactTopK

TOP_K = ExactTopK(budget_tokens=24, sink_tokens=2, recent_tokens=6, dense_layers=0)


def greedy_tokens(stock: Any, policy: Policy, prompt: torch.Tensor, num_new: int) -> list[int]:
    """The next tokens of a prompt [1, n]; under TOP_K the attention of `stock` is replaced."""
    from transformers import AttentionInterface

    if policy.selects:
        AttentionInterface.register("top_k_reference", attend_to_top_k)
        stock.config._attn_implementation = "top_k_reference"
    found, cache = [], None
    tokens = prompt
    for _ in range(num_new):
        out = stock(tokens, past_key_values=cache, use_cache=True)
        tokens, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        found.append(int(tokens))
    return found


def attend_to_top_k(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention; a single token attends to what ExactTopK selects of each KV head,
    but in layers with a window."""
    del mask
    _, num_heads, num_new, _ = query.shape
    kv_len, num_kv_heads = key.shape[2], key.shape[1]
    keys, values = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (key, value))
    scores = scaling * (query @ keys.mT)
    later = torch.ones(num_new, kv_len, dtype=torch.bool).triu(kv_len - num_new + 1)
    if sliding_window is not None:
        later |= torch.ones_like(later).tril(kv_len - num_new - sliding_window)
    scores = scores.masked_fill(later, -torch.inf)
    weights, lse = scores.softmax(-1), scores.logsumexp(-1, keepdim=True)
    if sliding_window is None and num_new == 1 and kv_len > TOP_K.budget_tokens:
        first, last = TOP_K.sink_tokens, kv_len - TOP_K.recent_tokens
        mass = weights[0, :, 0].view(num_kv_heads, -1, kv_len).sum(1)
        count = TOP_K.budget_tokens - TOP_K.sink_tokens - TOP_K.recent_tokens
        chosen = mass[:, first:last].topk(count).indices + first
        keeps = torch.zeros(num_kv_heads, kv_len)
        keeps[:, :first] = keeps[:, last:] = 1.0
        keeps.scatter_(1, chosen, 1.0)
        weights = weights * keeps.repeat_interleave(num_heads // num_kv_heads, 0)[None, :, None]
        total = weights.sum(-1, keepdim=True)
        weights, lse = weights / total, lse + total.log()
    if s_aux is not None:
        weights = weights * torch.sigmoid(lse - s_aux[:, None, None])
    return (weights @ values).transpose(1, 2).contiguous(), None
