"""Highly sparse heads of LFPS: how sparse they are, and what answers for them (equations 5, 6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.selection.compiled import cached_njit


@cached_njit()
def log_odds_of_sinks(
    scores: Any, num_sinks: Any, query: Any, mean_key: Any, ratio: Any, sm_scale: Any, kv_len: Any
) -> Any:
    """log(S / max(G, L)) and log(S + max(G, L)) of one head.

    Args:
        scores: scaled q.k of the sinks, then of the last tokens.
        ratio: variance of the scores over the squared norm of the query.
    """
    sinks = _log_sum_exp(scores[:num_sinks])
    local = _log_sum_exp(scores[num_sinks:])
    mean = 0.0
    norm = 0.0
    for d in range(len(query)):
        mean += query[d] * mean_key[d]
        norm += query[d] * query[d]
    spread = np.log(kv_len - num_sinks) + mean * sm_scale + 0.5 * ratio * norm
    rest = max(spread, local)
    if not np.isfinite(rest + sinks):
        return -np.inf, rest + sinks
    return sinks - rest, max(sinks, rest) + np.log1p(np.exp(-abs(sinks - rest)))


@cached_njit()
def _log_sum_exp(x: Any) -> Any:
    highest = x[0]
    for i in range(1, len(x)):
        highest = max(highest, x[i])
    total = 0.0
    for i in range(len(x)):
        total += np.exp(x[i] - highest)
    return highest + np.log(total)


@cached_njit()
def answer_from_sinks(
    scores: Any, sink_values: Any, mean_value: Any, share: Any, output: Any
) -> None:
    """output = share * sinks' values by softmax + (1 - share) * mean value, all [head_dim]."""
    head_dim = len(output)
    log_total = _log_sum_exp(scores)
    for d in range(head_dim):
        total = (1.0 - share) * mean_value[d]
        for i in range(len(scores)):
            total += share * np.exp(scores[i] - log_total) * sink_values[i * head_dim + d]
        output[d] = total
