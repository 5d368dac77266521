"""What LFPS takes from a prompt: the attention of its last queries, as first score tables."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from offload.selection.layer_state import BuildContext


def weights_of(
    queries: torch.Tensor,
    keys: torch.Tensor,
    sm_scale: float,
    scores: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Softmax weights of the last queries over the tokens but the sinks.

    Args:
        queries: float32 [heads, n, head_dim]; keys: float32 [num_tokens, head_dim], no sinks.
        scores, weights: buffers [heads, n, num_tokens], reused because new memory costs more than
            the arithmetic. `weights` receives the result, 0 after a query's own token.

    Returns:
        [heads], variance of the last query's scores over its squared norm.
    """
    heads, n, head_dim = queries.shape
    num_tokens = len(keys)
    torch.mm(queries.reshape(-1, head_dim) * sm_scale, keys.T, out=scores.view(heads * n, -1))
    last = queries[:, -1]
    ratios = scores[:, -1].var(dim=-1, correction=0) / last.square().sum(-1).clamp_min(1e-30)
    newest = min(n, num_tokens)  # the only tokens that any of the queries comes before
    tokens = torch.arange(num_tokens - newest, num_tokens, device=keys.device)
    future = tokens > torch.arange(num_tokens - n, num_tokens, device=keys.device)[:, None]
    scores[:, :, num_tokens - newest :].masked_fill_(future, -math.inf)
    torch.softmax(scores, -1, out=weights)
    weights[:, : n - newest].zero_()  # queries of sink tokens see nothing else
    return ratios


def check_queries(context: BuildContext, observed_queries: int) -> None:
    """Refuse to build from no queries."""
    if context.queries.shape[1] == 0:
        raise ValueError(
            "lfps builds its score tables from the last queries of the prompt, but 0 of"
            f" {observed_queries} were recorded for layer {context.layer_idx};"
            " show them to DecodeAttention.record_queries"
        )


def prompt_weights(
    context: BuildContext, sinks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What the last queries of each KV head attend to, and what bypasses answer with.

    Yields:
        weights float32 [group_size, n, kv_len - sinks], overwritten by the next; the mean key, the
        mean value and the sinks' values [2 + sinks, head_dim]; variance ratios [group_size].
    """
    num_kv_heads, kv_len, _ = context.keys.shape
    num_qo_heads, num_queries, _ = context.queries.shape
    group = num_qo_heads // num_kv_heads
    buffers = (2, group, num_queries, kv_len - sinks)
    scores, weights = torch.empty(buffers, dtype=torch.float32, device=context.keys.device)
    for kv_head in range(num_kv_heads):
        keys, values = context.keys[kv_head].float(), context.values[kv_head]
        queries = context.queries[kv_head * group : (kv_head + 1) * group].float()
        ratios = weights_of(queries, keys[sinks:], context.sm_scale, scores, weights)
        means = torch.stack([keys[sinks:].mean(0), values[sinks:].float().mean(0)])
        shared = torch.cat([means, values[:sinks].float()])
        yield weights, shared, ratios


def tables_on_device(
    context: BuildContext, sinks: int, gamma: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Equation 4 for all units, and what bypasses answer with, where the keys are.

    Args:
        group_size: query heads of a unit.

    Returns:
        float32 [num_units, 2, kv_len - sinks]: sums by position from the first token that is no
        sink, and by distance; [num_units, 2 + sinks, head_dim]; and [num_units, group_size].
    """
    num_kv_heads, kv_len, head_dim = context.keys.shape
    num_qo_heads, num_queries, _ = context.queries.shape
    num_units = num_qo_heads // group_size
    per_head = num_units // num_kv_heads
    sums = torch.empty(
        num_units, 2, kv_len - sinks, dtype=torch.float32, device=context.keys.device
    )
    answers = sums.new_zeros(num_units, 2 + sinks, head_dim)
    variance_ratios = sums.new_zeros(num_units, group_size)
    scale = 0.5 / ((1.0 - gamma) * num_queries)
    for kv_head, (weights, shared, ratios) in enumerate(prompt_weights(context, sinks)):
        units = slice(kv_head * per_head, (kv_head + 1) * per_head)
        answers[units] = shared
        variance_ratios[units] = ratios.view(-1, group_size)
        of_units = weights.view(per_head, group_size, *weights.shape[1:]).mean(1) * scale
        sums[units, 0] = of_units.sum(1)
        sums[units, 1] = slash_sums(of_units)
    return sums, answers, variance_ratios


def slash_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums by distance of weights [units, n, num_tokens], as `fill_tables` makes them, in torch.

    The last of the n queries is that of the last token; weights after a query's own token are 0.

    Returns:
        [units, num_tokens], by the distance of a token to a query.
    """
    units, n, num_tokens = weights.shape
    # Backwards, a query's own token is at n - 1 - row: rows that are one element shorter than they
    # are apart bring it to column 0.
    backwards = functional.pad(weights.flip(-1), (0, n))
    width = num_tokens + n
    aligned = backwards.as_strided(
        (units, n, num_tokens), (n * width, width - 1, 1), backwards.storage_offset() + n - 1
    )
    return aligned.sum(1)


def fill_tables(
    tables: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], sinks: int, gamma: float
) -> None:
    """Equation 4 for one unit: tables [2, capacity] from weights [n, kv_len - sinks]."""
    n, num_tokens = weights.shape
    weights = weights * np.float32(0.5 / ((1.0 - gamma) * n))
    tables[0, sinks : sinks + num_tokens] = weights.sum(0)
    for row, of_query in enumerate(weights):
        length = num_tokens - (n - 1 - row)  # tokens up to the query's own
        tables[1, : max(length, 0)] += of_query[: max(length, 0)][::-1]
