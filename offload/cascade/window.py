"""Some of the last queries of a sequence in every layer: what its tokens were asked for of late."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_QUERIES = 32  # of each query head
SPACING = 4  # tokens from one that is kept to the next


class QueryWindow:
    """Every `SPACING`-th query, rotated, of the last tokens of one sequence, in a ring.

    Tokens are counted from the first that the sequence has seen, whatever became of it since.
    """

    def __init__(
        self, *, num_layers: int, num_qo_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._ring = torch.zeros(num_layers, NUM_QUERIES, num_qo_heads, head_dim, dtype=dtype)
        self._span = (0, 0)  # tokens that were recorded last
        self._start = self._end = 0  # tokens whose queries are valid

    @staticmethod
    def bytes_for(*, num_layers: int, num_qo_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * NUM_QUERIES * num_qo_heads * head_dim * dtype.itemsize

    def record(self, layer_idx: int | slice, queries: Tensor, end: int) -> None:
        """`queries` [(layers,) num_qo_heads, n, head_dim] of tokens end - n … end - 1."""
        first = end - queries.shape[-2]
        self._note(first, end)
        kept = _kept(first, end)[-NUM_QUERIES:]
        if kept:
            rows = queries[..., kept.start - first :: SPACING, :].transpose(-3, -2)
            self._ring[layer_idx, _slots(kept)] = rows

    def last(self, num_tokens: int) -> Tensor:
        """[num_layers, num_qo_heads, n, head_dim]: those known of the first `num_tokens`, oldest
        first, n at most `NUM_QUERIES`."""
        kept = _kept(self._start, min(self._end, num_tokens))
        return self._ring[:, _slots(kept)].transpose(1, 2)

    def copy(self) -> QueryWindow:
        copied = QueryWindow.__new__(QueryWindow)
        copied._ring, copied._span = self._ring.clone(), self._span
        copied._start, copied._end = self._start, self._end
        return copied

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
    return range(first + -first % SPACING, end, SPACING)


def _slots(kept: range) -> list[int]:
    return [token // SPACING % NUM_QUERIES for token in kept]
