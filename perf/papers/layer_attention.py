"""Exact attention of all layers to one prompt, and what each layer keeps with another's tokens.

Everything that a way of sharing selections through layers does follows from these pairs of layers,
as long as the layers see what they see under full attention; no way needs a run of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.bench.eval.answers import greedy_answer
from offload.bench.eval.perplexity import Window
from offload.bench.eval.prompt import prompt_text, prompt_tokens
from offload.bench.eval.sample import string_match_all
from offload.runtime.shared_model import SharedModel
from perf.papers.kinds_of_text import Item

QUERIES = 16  # of a prompt at most: the tokens that are decoded, or answered
ADJACENT = ("cosine", "cosine_without_sinks", "overlap")
_TOP_TOKENS = 256
_SINKS = 4  # left out where they would hide all other differences

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerAttention:
    """Attention of a prompt's last queries.

    Attributes:
        weights: float32 [num_layers, num_kv_heads, num_queries, kv_len], mean of a KV head's query
            heads; 0 for tokens after a query.
        adjacent: [num_layers - 1, 3, num_qo_heads], of layers i and i + 1, by `ADJACENT`: the
            cosine of their weights, that without the sinks, and how many of the 256 heaviest tokens
            they have in common.
        wanted: bool [kv_len], tokens of the right answer in the prompt, with a space before them.
        right: share of the right answers in what the model says; None: nothing was asked.
    """

    weights: Tensor
    adjacent: FloatArray
    wanted: Tensor
    right: float | None


@dataclass(frozen=True)
class Pairs:
    """What layer j keeps if it attends to the tokens that layer i found: [..., i, j] for i <= j.

    Attributes:
        recall: [num_kv_heads, num_layers, num_layers], share of what layer i found that is among
            the equally many most important tokens of the head in layer j.
        mass: the same shape, attention mass without sinks, the recent window included; on the
            diagonal 1: a layer that selects attends to everything.
        answer: [num_layers, num_layers], weight on the answer's tokens, summed over heads and
            queries; on the diagonal all that there is.
    """

    recall: FloatArray
    mass: FloatArray
    answer: FloatArray


def attention_to(model: SharedModel, item: Item, tokenizer: Any, device: str) -> LayerAttention:
    """Read a window, or a question with what full attention answers, and look at its last queries.

    Args:
        model: `runtimes[0]` has full attention.
        device: where the weights are computed and stay.
    """
    right = None
    if isinstance(item, Window):
        tokens, num_queries = list(item.tokens[:-1]), QUERIES
        wanted = torch.zeros(len(tokens), dtype=torch.bool)
    else:
        text, room = prompt_text(item, tokenizer, chat=True), model.max_context - QUERIES
        tokens, _ = prompt_tokens(text, tokenizer, room)
        stop = model.eos_tokens
        with model.read(tokens) as prompt:
            answer = greedy_answer(model, 0, prompt, lambda said: said[-1] in stop, QUERIES).tokens
        right = string_match_all(tokenizer.decode(answer), item.outputs)
        wanted = torch.zeros(len(tokens) + len(answer) - 1, dtype=torch.bool)
        for output in item.outputs:
            for written in (output, f" {output}"):  # tokens depend on the space before them
                value = tokenizer(written)["input_ids"]
                for place in _places(tokens, value):
                    wanted[place : place + len(value)] = True
        tokens, num_queries = tokens + answer[:-1], len(answer)
    lean, store = model.runtimes[0].lean, model.runtimes[0].store
    num_kv_heads = lean.shape.num_kv_heads
    kv_lens = torch.arange(len(tokens) - num_queries + 1, len(tokens) + 1, device=device)
    future = torch.arange(len(tokens), device=device) >= kv_lens[:, None]
    of_units, comparisons, before = [], [], None
    last: dict[int, Tensor] = {}

    def keep(seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        both = torch.cat([last.get(layer_idx, queries[:, :0]), queries[:, -num_queries:]], 1)
        last[layer_idx] = both[:, -num_queries:].clone()

    with model.read(tokens, on_queries=keep) as prompt:
        (seq,) = prompt.cache.seqs
        for layer_idx in range(len(lean.layers)):
            keys = store.gather(seq, layer_idx)[0].to(device).float()
            queries = last[layer_idx].to(device).float()
            grouped = queries.view(num_kv_heads, -1, num_queries, keys.shape[-1])
            scores = lean.sm_scale * grouped @ keys[:, None].transpose(-1, -2)
            weights = scores.masked_fill_(future, -torch.inf).softmax(-1)
            of_units.append(weights.mean(1))
            if before is not None:
                comparisons.append(_adjacent(before.flatten(0, 1), weights.flatten(0, 1)))
            before = weights
    adjacent = torch.stack(comparisons).double().cpu().numpy()
    return LayerAttention(torch.stack(of_units), adjacent, wanted.to(device), right)


def _places(tokens: Sequence[int], part: Sequence[int]) -> list[int]:
    last = len(tokens) - len(part)
    return [i for i in range(last + 1) if tokens[i : i + len(part)] == part]


def _adjacent(before: Tensor, after: Tensor) -> Tensor:
    """Weights [num_qo_heads, num_queries, kv_len] of two layers -> [3, num_qo_heads]."""

    def cosine(first: int) -> Tensor:
        return torch.cosine_similarity(before[..., first:], after[..., first:], dim=-1).mean(-1)

    k = min(_TOP_TOKENS, before.shape[-1])
    member = torch.zeros_like(before, dtype=torch.bool)
    member.scatter_(-1, before.topk(k).indices, value=True)
    overlap = member.gather(-1, after.topk(k).indices).float().mean((-1, -2))
    return torch.stack([cosine(0), cosine(_SINKS), overlap])


def always_attended(weights: Tensor, sink_tokens: int, recent_tokens: int) -> tuple[Tensor, Tensor]:
    """bool [num_queries, kv_len] of `LayerAttention.weights`: (sinks and recent window, others)."""
    num_queries, kv_len = weights.shape[-2:]
    position = torch.arange(kv_len, device=weights.device)
    kv_lens = torch.arange(kv_len - num_queries + 1, kv_len + 1, device=weights.device)[:, None]
    before = position < kv_lens
    always = before & ((position < sink_tokens) | (position >= kv_lens - recent_tokens))
    return always, before & ~always


def compare_layers(
    attention: LayerAttention,
    *,
    budget_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    is_shared: bool,
) -> Pairs:
    """What each layer keeps with `budget_tokens` of each layer above it, sinks and window included.

    Args:
        is_shared: layers find one set of tokens for all their heads; else each KV head its own, for
            the same head further down.

    Raises:
        ValueError: a prompt that is shorter than the budget.
    """
    weights, wanted = attention.weights, attention.wanted
    num_layers, num_heads, num_queries, kv_len = weights.shape
    count = budget_tokens - sink_tokens - recent_tokens
    if not 0 < count <= kv_len - num_queries - sink_tokens - recent_tokens:
        raise ValueError(
            f"budget_tokens={budget_tokens} leaves {count} tokens to choose of a prompt of "
            f"{kv_len:,}, with {sink_tokens} sinks and {recent_tokens} recent tokens"
        )
    always, free = always_attended(weights, sink_tokens, recent_tokens)
    best = weights.masked_fill(~free, -1.0).topk(count).indices
    found = best
    if is_shared:
        found = weights.mean(1, keepdim=True).masked_fill(~free, -1.0).topk(count).indices
    recall = np.zeros((num_heads, num_layers, num_layers))
    mass, answer = np.zeros_like(recall), np.zeros((num_layers, num_layers))
    recent = always.clone()
    recent[:, :sink_tokens] = False
    for j in range(num_layers):
        above = found[: j + 1].expand(-1, num_heads, -1, -1)
        of_above = weights[j].expand(j + 1, -1, -1, -1)
        member = torch.zeros_like(weights[j], dtype=torch.bool).scatter_(-1, best[j], value=True)
        hits = member.expand_as(of_above).gather(-1, above).float().mean((-1, -2))
        recall[:, : j + 1, j] = hits.T.cpu()
        chosen = of_above.gather(-1, above).sum(-1) + (weights[j] * recent).sum(-1)
        total = weights[j, ..., sink_tokens:].sum(-1).clamp(min=1e-20)
        mass[:, : j + 1, j] = (chosen / total).mean(-1).T.cpu()
        to_answer = weights[j] * wanted
        chosen = to_answer.expand_as(of_above).gather(-1, above).sum((1, 2, 3))
        answer[: j + 1, j] = (chosen + (to_answer * always).sum()).cpu()
        mass[:, j, j], answer[j, j] = 1.0, float(to_answer.sum())
    return Pairs(recall, mass, answer)


def selecting_above(num_layers: int, layers: Sequence[int]) -> npt.NDArray[np.int64]:
    """Of every layer the last of `layers` above it, or itself; of those before all of them 0."""
    above = np.zeros(num_layers, np.int64)
    above[list(layers)] = list(layers)
    return np.maximum.accumulate(above)


def kept_below(pairs: FloatArray, layers: Sequence[int]) -> float:
    """Mean of [..., num_layers, num_layers] over the layers that reuse what `layers` select."""
    num_layers = pairs.shape[-1]
    reusing = [j for j in range(min(layers), num_layers) if j not in layers]
    above = selecting_above(num_layers, layers)
    return float(pairs[..., above[reusing], reusing].mean())


def answer_kept(answer: FloatArray, layers: Sequence[int]) -> float | None:
    """Share of the weight on the answer's tokens that all layers keep; None if there is none."""
    num_layers, first = len(answer), min(layers)
    above = selecting_above(num_layers, layers)
    below = np.arange(first, num_layers)
    total = float(np.trace(answer))
    kept = float(np.trace(answer[:first, :first]) + answer[above[below], below].sum())
    return kept / total if total > 0 else None
