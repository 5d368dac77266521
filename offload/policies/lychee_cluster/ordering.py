"""The best of a few scores, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.policies.lychee_cluster.views import bits_of_float
from offload.selection.compiled import cached_njit

_NO_KEY = np.int32(-(1 << 31))


@cached_njit()
def order_scores(scores: Any, keys: Any) -> None:
    """int32 keys in the order of float32 scores, NaN below all; may be the same memory."""
    for i in range(len(keys)):
        bits = np.int32(bits_of_float(scores[i]))
        key = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        keys[i] = key if scores[i] == scores[i] else _NO_KEY


@cached_njit()
def take_best_key(keys: Any) -> int:
    """Position of the first of the largest keys, which is then taken out; -1 if none is left."""
    largest = _NO_KEY
    for i in range(len(keys)):
        largest = max(largest, keys[i])
    best = np.int32(len(keys))
    for i in range(len(keys)):
        best = min(best, np.int32(i) if keys[i] == largest else np.int32(len(keys)))
    keys[best] = _NO_KEY
    return int(best) if largest > _NO_KEY else -1
