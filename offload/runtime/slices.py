"""A batch that is longer than what its sequences may have is read in slices of columns.

Before each slice what is there is condensed (`offload.kv_compression`), so that the slice fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offload.kv_compression.base import KVCompression
from offload.models.batch import RaggedBatch
from offload.runtime.cache import OffloadedCache

# Gets (hidden, batch, cache, tokens, prompt_columns): `Runtime.run` of what fits.
Run = Callable[[Tensor, RaggedBatch, OffloadedCache, Tensor | None, int], tuple[Tensor, str]]


@dataclass(frozen=True)
class BatchSlice:
    """Some columns of a batch, as a batch.

    Attributes:
        tokens: which packed tokens of the whole batch these are.
        prompt_columns: the columns of it before this one are prompt.
    """

    batch: RaggedBatch
    tokens: slice | Tensor
    prompt_columns: int


def run_in_slices(
    run: Run,
    hidden: Tensor,
    batch: RaggedBatch,
    cache: OffloadedCache,
    compression: KVCompression[Any],
    tokens: Tensor | None,
    prompt_columns: int,
) -> tuple[Tensor, str]:
    """As `run` of the whole batch.

    After an error a cache that was new is so again. Another one has the slices that were done,
    and the columns that it says it has.
    """
    phase, is_new = "", not cache.seqs
    try:
        for part in slices_of(batch, cache, compression, prompt_columns):
            ids = None if tokens is None else tokens[part.tokens]
            of_part, phase_of_part = run(
                hidden[part.tokens], part.batch, cache, ids, part.prompt_columns
            )
            if part.batch is batch:
                return of_part, phase_of_part
            hidden[part.tokens] = of_part
            phase = phase or phase_of_part
    except BaseException:
        if is_new:
            cache.reset()
        raise
    return hidden, phase


def slices_of(
    batch: RaggedBatch, cache: OffloadedCache, compression: KVCompression[Any], prompt_columns: int
) -> Iterator[BatchSlice]:
    """Slices that fit, each to be run before the next is asked for."""
    seq_len, start = batch.rows_shape[1], 0
    used = [compression.used(seq) for seq in cache.seqs] or [0] * batch.num_sequences
    ends = (n + new for n, new in zip(used, batch.num_new_tokens, strict=True))
    if all(end <= compression.bound.slots for end in ends):
        yield BatchSlice(batch, slice(None), prompt_columns)
        return
    columns = batch.columns % seq_len
    while start < seq_len:
        stop = seq_len
        for sequence, first, last in batch.spans():
            first += int((columns[first:last] < start).sum())
            room = last - first
            if cache.seqs:
                room = compression.room(cache.seqs[sequence], room)
            else:
                room = min(room, compression.bound.slots)
            if first + room < last:
                stop = min(stop, int(columns[first + room]))
        if (start, stop) == (0, seq_len):
            yield BatchSlice(batch, slice(None), prompt_columns)
        else:
            of_slice = max(0, min(prompt_columns - start, stop - start))
            yield _slice(batch, columns, start, stop, of_slice)
        start = stop


def _slice(
    batch: RaggedBatch, columns: Tensor, start: int, stop: int, prompt_columns: int
) -> BatchSlice:
    """The columns start … stop. Only in the last of them rows of one sequence get one each."""
    seq_len, width, indptr = batch.rows_shape[1], stop - start, [0]
    is_last = stop == seq_len
    chosen = ((columns >= start) & (columns < stop)).nonzero().squeeze(1)
    rows = batch.columns[chosen] // seq_len
    for sequence in range(batch.num_sequences):
        first, last = batch.indptr[sequence], batch.indptr[sequence + 1]
        of_sequence = (chosen >= first) & (chosen < last)
        indptr.append(indptr[-1] + int(of_sequence.sum()))
        if not is_last:
            rows[of_sequence] = sequence
    sequence_of_row = batch.sequence_of_row if is_last else list(range(batch.num_sequences))
    part = RaggedBatch(
        indptr=indptr,
        columns=rows * width + columns[chosen] - start,
        position_ids=batch.position_ids[chosen],
        sequence_of_row=sequence_of_row,
        rows_shape=(len(sequence_of_row), width),
    )
    return BatchSlice(part, chosen, prompt_columns)
