"""Has tokens read again that were decoded sparsely: at once, or in slices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch

from offload.decode.decoder import Decoder
from offload.models.batch import RaggedBatch
from offload.prefill.forward import prefill
from offload.runtime.correcting import RunningCorrection, SparseTokens
from offload.runtime.model_loading import LoadedModel
from offload.runtime.sequences import Sequences
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded


class Corrector:
    """Has what waits read again, of the sequences of one model.

    Args:
        opened: the model.
        sequences: which know what waits.
        decoder: what has memory of a GPU.
    """

    def __init__(self, opened: LoadedModel, sequences: Sequences, decoder: Decoder) -> None:
        self._model, self._config, self._device = opened.lean, opened.config, opened.device
        self._sequences, self._decoder = sequences, decoder

    def correct(self, seqs: Sequence[int]) -> int:
        """Read again what is due of `seqs`, before their next step: how many tokens that was.

        Raises:
            HostBudgetError, DeviceMemoryError: there is no room for it now.
            ValueError: keys or values that are not finite. What was not read waits on.
        """
        corrections = self._sequences.corrections
        assert corrections is not None
        due = {seq: corrections.waiting(seq).part() for seq in seqs if corrections.are_due([seq])}
        running = RunningCorrection(due)
        try:
            with shielded():  # or ctrl-C might leave copies without an owner
                running.copies = self._sequences.fork_to_correct(due)
            self._read(due, list(running.copies.values()))
        except BaseException:
            self._sequences.give_up_correction(running)
            raise
        self._sequences.end_correction(running)
        return running.num_tokens

    def read_slice(self, seq: int, running: RunningCorrection, num_tokens: int) -> None:
        """Read the next `num_tokens` of one sequence, now; behind the last it is corrected.

        Raises:
            As `correct`. What was read before has to be given up.
        """
        self._decoder.check_usable()
        self._decoder.trim()
        with shielded():
            if not running.copies:
                running.copies = self._sequences.fork_to_correct(running.tokens)
        copies, start = [running.copies[seq]], running.num_read
        tokens = {seq: running.tokens[seq].part(start, start + num_tokens)}
        self._read(tokens, copies)
        self._sequences.store.commit(copies, [num_tokens])
        running.num_read += num_tokens
        if not running.num_left:
            self._sequences.end_correction(running)

    def _read(self, due: dict[int, SparseTokens], copies: Sequence[int]) -> None:
        lens = [len(tokens.ids) for tokens in due.values()]
        ids = [token for tokens in due.values() for token in tokens.ids]
        positions = [position for tokens in due.values() for position in tokens.positions]
        batch = RaggedBatch(
            indptr=[0, *itertools.accumulate(lens)],
            columns=torch.arange(len(ids)),
            position_ids=torch.tensor(positions),
            sequence_of_row=list(range(len(lens))),
            rows_shape=(1, len(ids)),
        )
        prefill(
            self._model,
            self._model.embed_tokens(torch.tensor(ids).to(self._device)),
            batch,
            store=self._sequences.store,
            seqs=copies,
            slice_tokens=self._config.prefill_slice_tokens,
            pool=self._decoder.pool,
            device_budget_bytes=self._config.max_memory.get(self._device.index or 0),
            give_back=partial(give_back, self._decoder, list(due)),
        )


def give_back(decoder: Decoder, seqs: Sequence[int], why: DeviceMemoryError) -> bool:
    """Device memory for a prefill of `seqs`: as `Decoder.give_heads_back`, but what there is of
    them goes first."""
    before = decoder.device_bytes
    for seq in seqs:
        decoder.forget(seq)
    decoder.trim()
    return decoder.device_bytes < before or decoder.give_heads_back(why)
