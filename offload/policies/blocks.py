"""Policies that rank blocks of tokens by something that is not their attention.

Such a policy hands over what it ranks by: in a step `select` leaves
`block_scores`, `block_starts` and `num_blocks` in its context; for queries of the past
`BlockPolicy.block_scores` gives the same. So a wrapper can budget what it selects
(`offload.policies.hard_kv.block_share`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from offload.policies.base import SparsePolicy
from offload.selection.layer_state import State

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockPolicy(SparsePolicy):
    """A policy that selects all tokens of a block before any of a block with a lower score."""

    @abstractmethod
    def block_scores(
        self, arrays: State, queries: Tensor, sm_scale: float
    ) -> tuple[Tensor, npt.NDArray[np.int32]]:
        """The scores by which `select` would rank all blocks of `build`'s arrays.

        Args:
            queries: [num_qo_heads, n, head_dim].

        Returns:
            float32 [num_kv_heads, n, num_blocks], and [num_blocks + 1] where blocks begin, and the
            last one ends.
        """
