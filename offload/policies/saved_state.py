"""What is remembered of a sequence, as named arrays for a file, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offload.policies.layer_state import State
from offload.policies.remembered import Remembered


@dataclass
class SavedState:
    """Of one sequence.

    Attributes:
        marks: uint8, of the text of its first tokens.
        layers: the policy's arrays of each layer; none: they were not built.
        capacity_tokens: that these have room for.
        queries: of each layer that keeps recent ones [num_qo_heads, n, head_dim], oldest first, and
            of how many tokens the last is the newest.
    """

    marks: npt.NDArray[np.uint8]
    layers: dict[int, State] = field(default_factory=dict)
    capacity_tokens: int = 0
    queries: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of the policy's arrays."""
        return sum(array.nbytes for arrays in self.layers.values() for array in arrays.values())


def saved_state(known: Remembered) -> SavedState:
    """What matters of it between two forward passes. The arrays are its own, not copies."""
    saved = SavedState(known.marks.array[: known.marks.length])
    if known.arrays is not None:
        saved.capacity_tokens = known.arrays.capacity_tokens
        layers: list[dict[str, npt.NDArray[Any]]] = known.arrays.layers
        saved.layers = {i: arrays for i, arrays in enumerate(layers) if arrays}
    for layer_idx, recent in (known.queries or {}).items():
        saved.queries[layer_idx] = recent.kept().cpu(), recent.kv_len
    return saved
