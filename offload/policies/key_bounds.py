"""Element-wise extremes of keys, and the sums of a query that they bound (see `quest`)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@numba.njit(cache=True)
def split_query(query: Any, group_size: Any, head_dim: Any, split: Any) -> None:
    """split [2 * head_dim] = sums over the group of max(q, 0) and of min(q, 0); query is flat."""
    for d in range(head_dim):
        above = np.float32(0.0)
        below = np.float32(0.0)
        for g in range(group_size):
            x = query[g * head_dim + d]
            if x > 0.0:
                above += x
            else:
                below += x  # NaN comes here, and on into the scores
        split[d] = above
        split[head_dim + d] = below


@numba.njit(cache=True)
def page_bounds(keys: Any, page_tokens: Any, head_dim: Any, bounds: Any) -> None:
    """bounds [2 * head_dim] = maxima and minima of each element; keys is flat, a row per token."""
    for d in range(head_dim):
        highest = keys[d]
        lowest = keys[d]
        for i in range(1, page_tokens):
            x = keys[i * head_dim + d]
            highest = max(highest, x)
            lowest = min(lowest, x)
        bounds[d] = highest
        bounds[head_dim + d] = lowest


def as_numpy(x: Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as an array; bfloat16, which NumPy lacks, as uint16."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[Any] = x.numpy()
    return array
