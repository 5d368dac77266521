"""Some of the last queries of a sequence in every layer: what its tokens were asked for of late."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

NUM_QUERIES = 16  # of each query head
SPACING = 8  # tokens from one that is kept to the next


class QueryWindow:
    """Every `SPACING`-th query, rotated, of the last tokens of one sequence, in a ring: the
    `SPACING`-th token's, twice that one's, and so on.

    Tokens are counted from the first that the sequence has seen, whatever became of it since.
    """

    def __init__(
        self, *, num_layers: int, num_qo_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._ring = torch.zeros(num_layers, NUM_QUERIES, num_qo_heads, head_dim, dtype=dtype)
        self._owners = [1]  # of the ring: it is copied when one of several records
        self._span = (0, 0)  # tokens that were recorded last
        self._start = self._end = 0  # tokens whose queries are valid

    @staticmethod
    def bytes_for(*, num_layers: int, num_qo_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * NUM_QUERIES * num_qo_heads * head_dim * dtype.itemsize

    def record(self, layer_idx: int | slice, queries: Tensor, end: int) -> None:
        """`queries` [(layers,) num_qo_heads, n, head_dim] of tokens end - n … end - 1."""
        self.make_own()
        first = end - queries.shape[-2]
        self._note(first, end)
        kept = _kept(first, end)[-NUM_QUERIES:]
        if kept:
            rows = queries[..., kept.start - first :: SPACING, :].transpose(-3, -2)
            self._ring[layer_idx, _slots(kept)] = rows.to(self._ring.device)

    def last(self, num_tokens: int) -> Tensor:
        """[num_layers, num_qo_heads, n, head_dim]: those known of the first `num_tokens`, oldest
        first, n at most `NUM_QUERIES`."""
        kept = _kept(self._start, min(self._end, num_tokens))
        return self._ring[:, _slots(kept)].transpose(1, 2)

    def copy(self) -> QueryWindow:
        self._owners[0] += 1
        return copy.copy(self)

    @property
    def is_own(self) -> bool:
        """Whether no copy has the same memory."""
        return self._owners[0] == 1

    def make_own(self) -> None:
        """Part from copies that have the same memory."""
        if not self.is_own:
            ring = self._ring.clone()
            self.release()
            self._ring, self._owners = ring, [1]

    def release(self) -> None:
        """It is used no more."""
        self._owners[0] -= 1

    @staticmethod
    def held_bytes(windows: Iterable[QueryWindow]) -> int:
        """Memory of several, of which some may have the same."""
        return sum({id(x._ring): x._ring.nbytes for x in windows}.values())

    def _note(self, first: int, end: int) -> None:
        if (first, end) == self._span:
            return  # of the layer before
        self._span = (first, end)
        if first < self._start or _kept(self._end, first):  # all taken back, or some not seen
            self._start = first
        self._start = max(self._start, end - SPACING * NUM_QUERIES)
        self._end = end


def _kept(first: int, end: int) -> range:
    """The tokens of first … end - 1 whose queries are kept."""
    return range(first + -(first + 1) % SPACING, end, SPACING)


def _slots(kept: range) -> list[int]:
    return [token // SPACING % NUM_QUERIES for token in kept]
