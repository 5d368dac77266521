"""Prefill and decode: which tokens of a forward pass are prompt, and which are decoded.

A prompt is attended to in full and decoding is sparse, so the phase of a token must not depend on
how it came: alone or with many, in one call with the prompt or in the next, on a CPU or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offload.models.batch import RaggedBatch
from offload.runtime.cache import OffloadedCache
from offload.runtime.generation import Generation

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class BatchPart:
    """Tokens of a batch that go through the layers together.

    Attributes:
        batch: of these tokens; every sequence has one.
        sequences: which sequence of the whole batch each is.
        tokens: which packed tokens of the whole batch they are.
    """

    phase: Phase
    batch: RaggedBatch
    sequences: list[int]
    tokens: slice | Tensor


def prompt_columns_of(batch: RaggedBatch, cache: OffloadedCache, generation: Generation) -> int:
    """How many columns of `batch`, which continues `cache`, are prompt.

    A `generate()` knows where its prompt ends. Without one, a token for each row of a cache is
    decoded, and several are a prompt.
    """
    past_columns, seq_len = cache.get_seq_length(), batch.rows_shape[1]
    if generation.cache is cache:
        return max(0, min(generation.prompt_columns - past_columns, seq_len))
    return 0 if past_columns and max(batch.num_new_tokens) == 1 else seq_len


def parts_of(
    batch: RaggedBatch, prompt_columns: int, max_step_tokens: int | None
) -> list[BatchPart]:
    """`batch` as parts that run one after the other, prompt first.

    Args:
        prompt_columns: the columns of the batch before this one are prompt.
        max_step_tokens: that a sequence decodes in one step; None: any number.
    """
    seq_len = batch.rows_shape[1]
    if seq_len == 1 and batch.num_tokens == batch.num_sequences:
        return [whole_part("prefill" if prompt_columns else "decode", batch)]
    is_prompt = batch.columns % seq_len < prompt_columns
    parts = []
    if bool(is_prompt.any()):
        parts.append(_part("prefill", batch, is_prompt))
    if not bool(is_prompt.all()):
        if max_step_tokens is None:
            parts.append(_part("decode", batch, ~is_prompt))
        else:
            parts += _steps(batch, ~is_prompt, max_step_tokens)
    return parts


def _steps(batch: RaggedBatch, is_decoded: Tensor, max_step_tokens: int) -> list[BatchPart]:
    """The next tokens of each sequence, `max_step_tokens` at a time."""
    step_of_token = torch.empty(batch.num_tokens, dtype=torch.int64)
    for _, first, last in batch.spans():
        step_of_token[first:last] = (is_decoded[first:last].cumsum(0) - 1) // max_step_tokens
    num_steps = int(step_of_token[is_decoded].max()) + 1
    return [
        _part("decode", batch, is_decoded & (step_of_token == step)) for step in range(num_steps)
    ]


def whole_part(phase: Phase, batch: RaggedBatch) -> BatchPart:
    """All of a batch."""
    return BatchPart(phase, batch, list(range(batch.num_sequences)), slice(None))


def _part(phase: Phase, batch: RaggedBatch, is_chosen: Tensor) -> BatchPart:
    """The tokens where `is_chosen`, bool [num_tokens], of the sequences that have any."""
    if bool(is_chosen.all()) and min(batch.num_new_tokens) > 0:
        return whole_part(phase, batch)
    chosen = is_chosen.nonzero().squeeze(1)
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    sequences, indptr = [], [0]
    for sequence, start, stop in batch.spans():
        num_tokens = int(is_chosen[start:stop].sum())
        if num_tokens:
            sequences.append(sequence)
            indptr.append(indptr[-1] + num_tokens)
    part = RaggedBatch(
        indptr=indptr,
        columns=batch.columns[chosen],
        position_ids=batch.position_ids[chosen],
        sequence_of_row=batch.sequence_of_row,
        rows_shape=batch.rows_shape,
    )
    # A view where it can be one: the embeddings of a prompt are large.
    tokens = slice(first, last) if last - first == len(chosen) else chosen
    return BatchPart(phase, part, sequences, tokens)
