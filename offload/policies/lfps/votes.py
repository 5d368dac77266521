"""How LFPS's tables see a step: the mean attention weight of the heads that vote."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from offload.selection.compiled import cached_njit


@numba.njit(inline="always")
def _sums_of_four(weights: Any, begin: Any, group_size: Any, num: Any, first: Any) -> Any:
    """Sums of the heads from `begin` on, side by side: each waits for its last addition."""
    last = group_size - 1
    a = weights[min(begin, last) * num + first : (min(begin, last) + 1) * num]
    b = weights[min(begin + 1, last) * num + first : (min(begin + 1, last) + 1) * num]
    c = weights[min(begin + 2, last) * num + first : (min(begin + 2, last) + 1) * num]
    d = weights[min(begin + 3, last) * num + first : (min(begin + 3, last) + 1) * num]
    of_a = of_b = of_c = of_d = np.float32(0.0)
    for i in range(len(a)):
        of_a += a[i]
        of_b += b[i]
        of_c += c[i]
        of_d += d[i]
    return of_a, of_b, of_c, of_d


@cached_njit()
def group_weights(
    weights: Any, num: Any, first: Any, group_size: Any, votes: Any, combined: Any
) -> Any:
    """Half the voting heads' mean weight of each attended token but the sinks.

    Args:
        weights: [group_size * num] normalised weights; the first `first` of each head are sinks'.
        combined: receives [num - first].

    Returns:
        whether anybody voted.
    """
    voters = 0
    for g in range(group_size):
        voters += np.int64(votes[g] > 0.0)
    combined[:] = np.float32(0.0)
    voted = False
    for begin in range(0, group_size, 4):
        totals = _sums_of_four(weights, begin, group_size, num, first)
        for k in range(min(4, group_size - begin)):
            g, total = begin + k, totals[k]
            if votes[g] > 0.0 and total > 1e-20:
                factor = np.float32(0.5 / (total * voters))
                row = weights[g * num + first : (g + 1) * num]
                for i in range(len(row)):
                    combined[i] += factor * row[i]
                voted = True
    return voted
