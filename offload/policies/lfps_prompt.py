"""What LFPS takes from a prompt: the attention of its last queries, as first score tables."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch


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
    tokens = torch.arange(num_tokens - newest, num_tokens)
    future = tokens > torch.arange(num_tokens - n, num_tokens)[:, None]
    scores[:, :, num_tokens - newest :].masked_fill_(future, -math.inf)
    torch.softmax(scores, -1, out=weights)
    weights[:, : n - newest].zero_()  # queries of sink tokens see nothing else
    return ratios


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
