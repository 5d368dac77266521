"""Has tokens read again that were decoded sparsely: at once, in slices, or beside steps.

While a GPU decodes a token with the old keys and values, the cached tokens of a layer come in, and
behind it the GPU reads those that wait through that layer. (At the same time they would not be
done sooner: a step leaves the GPU little, and its small kernels wait for large ones.) What was
decoded meanwhile waits for the next correction. How many steps that takes depends on nothing but
the number of layers, so that a generation gives the same tokens each time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from offload.decode.decoder import Decoder
from offload.models.batch import RaggedBatch
from offload.prefill.forward import prefill_by_layer
from offload.runtime.correcting import BackgroundCorrection, RunningCorrection, SparseTokens
from offload.runtime.model_loading import LoadedModel
from offload.runtime.sequences import Sequences
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded

logger = logging.getLogger(__name__)


class Corrector:
    """Has what waits read again, of the sequences of one model.

    Args:
        opened: the model.
        sequences: which know what waits, and what runs (`Sequences.background`).
        decoder: what has memory of a GPU.
    """

    def __init__(self, opened: LoadedModel, sequences: Sequences, decoder: Decoder) -> None:
        self._model, self._config, self._device = opened.lean, opened.config, opened.device
        self._sequences, self._decoder = sequences, decoder

    def has_work(self, seqs: Sequence[int]) -> bool:
        """Whether something is due of `seqs`, or goes on."""
        corrections, running = self._sequences.corrections, self._sequences.background.running
        return running is not None or (corrections is not None and corrections.are_due(seqs))

    def correct(
        self, seqs: Sequence[int], *, beside: bool
    ) -> tuple[BackgroundCorrection | None, int]:
        """Before a step of `seqs`: (what goes on beside it, tokens whose correction is done).

        Args:
            beside: what is due is read beside the steps that come next, if there is room; else now.

        Raises:
            HostBudgetError, DeviceMemoryError: there is no room for it now.
            ValueError: keys or values that are not finite. What was not read waits on.
        """
        num_corrected = 0
        while (running := self._running(seqs, beside)) is not None:
            if running.is_beside and running.steps_left and running.error is None:
                return running, num_corrected
            try:
                while running.steps_left and running.error is None:
                    running.go_on()
                running.finish()
            except BaseException as error:
                self._sequences.background.give_up()
                if not running.is_beside or not isinstance(error, DeviceMemoryError):
                    raise
                logger.info("no room for a correction beside steps: %s", error)
                beside = False
                continue
            self._sequences.end_correction(running)
            num_corrected += running.num_tokens
        return None, num_corrected

    def read_slice(self, seq: int, running: RunningCorrection, num_tokens: int) -> None:
        """Read the next `num_tokens` of one sequence, now; behind the last it is corrected.

        Raises:
            As `correct`. What was read before has to be given up.
        """
        self._decoder.check_usable()
        self._sequences.background.give_up()  # for room
        self._decoder.trim()
        with shielded():
            if not running.copies:
                running.copies = self._sequences.fork_to_correct(running.tokens)
        copies, start = [running.copies[seq]], running.num_read
        tokens = {seq: running.tokens[seq].part(start, start + num_tokens)}
        with closing(self._layers(tokens, copies, beside=False)) as layers:
            for _ in layers:
                pass
        self._sequences.store.commit(copies, [num_tokens])
        running.num_read += num_tokens
        if not running.num_left:
            self._sequences.end_correction(running)

    def _running(self, seqs: Sequence[int], beside: bool) -> BackgroundCorrection | None:
        """What goes on of `seqs`, or begins: all that is due. None: nothing is, or it waits for
        that of others."""
        running, corrections = self._sequences.background.running, self._sequences.corrections
        if running is not None and running.copies.keys() <= set(seqs):
            running.is_beside &= beside
            return running
        assert corrections is not None
        due = {seq: corrections.waiting(seq).part() for seq in seqs if corrections.are_due([seq])}
        may_wait = all(map(corrections.may_wait, due.values()))
        if not due or (running is not None and beside and may_wait):
            return None
        self._sequences.background.give_up()
        is_beside = beside and may_wait
        with shielded():  # or ctrl-C might leave copies without an owner
            copies = self._sequences.fork_to_correct(due)
            layers = self._layers(due, list(copies.values()), is_beside)
            steps = corrections.steps_beside
            running = BackgroundCorrection(
                due, copies, layers=layers, steps_left=steps, is_beside=is_beside
            )
            self._sequences.background.running = running
        return running

    def _layers(
        self, due: dict[int, SparseTokens], copies: Sequence[int], beside: bool
    ) -> Generator[None, None, Tensor]:
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
        return (
            yield from prefill_by_layer(
                self._model,
                self._model.embed_tokens(torch.tensor(ids).to(self._device)),
                batch,
                store=self._sequences.store,
                seqs=copies,
                slice_tokens=self._config.prefill_slice_tokens,
                pool=self._decoder.pool,
                device_budget_bytes=self._config.max_memory.get(self._device.index or 0),
                give_back=None if beside else partial(give_back, self._decoder, list(due)),
            )
        )


def give_back(decoder: Decoder, seqs: Sequence[int], why: DeviceMemoryError) -> bool:
    """Device memory for a prefill of `seqs`: as `Decoder.give_heads_back`, but what there is of
    them goes first."""
    before = decoder.device_bytes
    for seq in seqs:
        decoder.forget(seq)
    decoder.trim()
    return decoder.device_bytes < before or decoder.give_heads_back(why)
