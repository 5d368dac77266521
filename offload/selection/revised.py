"""Keys of the last tokens that were written anew: what `LayerState.revise` gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class Revised:
    """Tokens first .. kv_len - 1 of one layer of one sequence; the others are what they were.

    Those that were there before have the ids and the text marks that they had.

    Attributes:
        load_keys: gives the keys [num_kv_heads, n, head_dim] of the tokens from one on.
        num_layers, num_kv_heads: of the model.
    """

    first: int
    kv_len: int
    load_keys: Callable[[int], Tensor]
    num_layers: int
    num_kv_heads: int

    def of_heads(self, heads: npt.NDArray[np.int64]) -> Revised:
        """The same for a model that has only these KV heads."""
        load_keys = self.load_keys
        return replace(
            self, load_keys=lambda start: load_keys(start)[heads], num_kv_heads=len(heads)
        )
