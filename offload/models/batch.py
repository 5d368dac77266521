"""The new tokens of a batch without their padding, one sequence after the other.

transformers hands `forward` a rectangle [batch_size, seq_len] with an attention mask; the KV store,
prefill and decode see ragged sequences. Here is the only place that knows both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedBatch:
    """Sequence `i` owns the packed tokens indptr[i] .. indptr[i + 1].

    Attributes:
        indptr: [num_sequences + 1].
        columns: int64 [num_tokens]; where each token is in the flattened rectangle.
        position_ids: int64 [num_tokens].
        sequence_of_row: [batch_size]; rows with the same tokens share a sequence.
        rows_shape: (batch_size, seq_len).
    """

    indptr: list[int]
    columns: torch.Tensor
    position_ids: torch.Tensor
    sequence_of_row: list[int]
    rows_shape: tuple[int, int]

    @property
    def num_sequences(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_tokens(self) -> int:
        return self.indptr[-1]

    @property
    def num_new_tokens(self) -> list[int]:
        """New tokens of each sequence."""
        return [stop - start for start, stop in zip(self.indptr[:-1], self.indptr[1:], strict=True)]

    def spans(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(sequence, first, last + 1) of the packed tokens of each sequence in start .. stop."""
        stop = self.num_tokens if stop is None else stop
        for sequence in range(self.num_sequences):
            first = max(self.indptr[sequence], start)
            last = min(self.indptr[sequence + 1], stop)
            if first < last:
                yield sequence, first, last

    def to_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """[num_tokens, width] -> [batch_size, seq_len, width]; padding becomes zeros."""
        batch_size, seq_len = self.rows_shape
        width = packed.shape[-1]
        if self.num_tokens == batch_size * seq_len:
            return packed.view(batch_size, seq_len, width)
        rows = packed.new_zeros(batch_size * seq_len, width)
        rows[self.columns] = packed
        rows = rows.view(batch_size, seq_len, width)
        # A row that shares a sequence holds no token itself: it repeats the row that does.
        return rows[self._source_rows()]

    def attended(self) -> torch.Tensor:
        """bool [batch_size, seq_len], False at padding."""
        batch_size, seq_len = self.rows_shape
        is_token = torch.zeros(batch_size * seq_len, dtype=torch.bool)
        is_token[self.columns] = True
        return is_token.view(batch_size, seq_len)[self._source_rows()]

    def _source_rows(self) -> list[int]:
        first_row: dict[int, int] = {}
        for row, sequence in enumerate(self.sequence_of_row):
            first_row.setdefault(sequence, row)
        return [first_row[sequence] for sequence in self.sequence_of_row]


def tokens_each(batch_size: int, num_tokens: int = 1) -> RaggedBatch:
    """New tokens in each row, whose positions the caller knows."""
    rows = list(range(batch_size))
    total = batch_size * num_tokens
    return RaggedBatch(
        indptr=list(range(0, total + 1, num_tokens)),
        columns=torch.arange(total),
        position_ids=torch.zeros(total, dtype=torch.int64),
        sequence_of_row=rows,
        rows_shape=(batch_size, num_tokens),
    )


def pack(
    rows_shape: tuple[int, int],
    attended: torch.Tensor | None,
    position_ids: torch.Tensor,
    shared_rows: torch.Tensor | None = None,
) -> RaggedBatch:
    """The tokens of a rectangle that are not padding.

    Args:
        rows_shape: (batch_size, seq_len).
        attended: bool [batch_size, seq_len], False at padding; None if there is none.
        position_ids: int64 [batch_size or 1, seq_len].
        shared_rows: int64 [batch_size, seq_len]; rows equal in it (and in the other arguments) are
            packed once. None packs every row.

    Raises:
        ValueError: there are no tokens.
    """
    batch_size, seq_len = rows_shape
    position_ids = position_ids.expand(batch_size, seq_len)
    sequence_of_row = list(range(batch_size))
    if shared_rows is not None and batch_size > 1:
        described = [shared_rows, position_ids]
        if attended is not None:
            described.append(attended.long())
        unique = torch.cat(described, dim=1).tolist()
        first: dict[tuple[int, ...], int] = {}
        sequence_of_row = [first.setdefault(tuple(row), len(first)) for row in unique]

    is_token = torch.ones(rows_shape, dtype=torch.bool) if attended is None else attended.clone()
    seen: set[int] = set()
    for row, sequence in enumerate(sequence_of_row):
        if sequence in seen:
            is_token[row] = False
        seen.add(sequence)
    columns = is_token.flatten().nonzero().squeeze(1)
    if not len(columns):
        raise ValueError(f"attention_mask hides all of the new tokens {list(rows_shape)}")
    num_tokens = is_token.sum(dim=1).tolist()
    indptr = [0]
    for row, sequence in enumerate(sequence_of_row):
        if sequence == len(indptr) - 1:  # the first row of its sequence
            indptr.append(indptr[-1] + num_tokens[row])
    return RaggedBatch(
        indptr=indptr,
        columns=columns,
        position_ids=position_ids.flatten()[columns],
        sequence_of_row=sequence_of_row,
        rows_shape=rows_shape,
    )
