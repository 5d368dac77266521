"""Has tokens read again that were decoded sparsely: before the next step, or beside steps.

While a GPU decodes a token with the old keys and values, the cached tokens of a layer come in, and
behind it the GPU reads those that wait through that layer. (At the same time they would not be
done sooner: a step leaves the GPU little, and its small kernels wait for large ones.) What was
decoded meanwhile waits for the next correction. How many steps that takes depends on nothing but
the number of layers, so that a generation gives the same tokens each time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.models.batch import RaggedBatch
from offload.prefill.forward import prefill_by_layer
from offload.runtime.correcting import BackgroundCorrection, SparseTokens
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
        pool: of kernels on a CPU.
        give_back: gets sequences, and why a GPU needs more memory; whether there is more now.
    """

    def __init__(
        self,
        opened: LoadedModel,
        sequences: Sequences,
        pool: WorkerPool,
        give_back: Callable[[Sequence[int], DeviceMemoryError], bool],
    ) -> None:
        self._model, self._config, self._device = opened.lean, opened.config, opened.device
        self._sequences, self._pool, self._give_back = sequences, pool, give_back

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
            if running.is_beside and running.num_left and running.error is None:
                return running, num_corrected
            try:
                while running.num_left and running.error is None:
                    running.go_on()
                running.finish()
            except BaseException as error:
                self._sequences.background.give_up()
                if not running.is_beside or not isinstance(error, DeviceMemoryError):
                    raise
                logger.info("no room for a correction beside steps: %s", error)
                beside = False
                continue
            self._sequences.end_background()
            num_corrected += running.num_tokens
        return None, num_corrected

    def _running(self, seqs: Sequence[int], beside: bool) -> BackgroundCorrection | None:
        """What goes on of `seqs`, or begins: all that is due. None: nothing is, or it waits for
        that of others."""
        running, corrections = self._sequences.background.running, self._sequences.corrections
        if running is not None and running.copies.keys() <= set(seqs):
            running.is_beside &= beside
            return running
        assert corrections is not None
        due = {seq: corrections.waiting(seq).copy() for seq in seqs if corrections.are_due([seq])}
        may_wait = all(map(corrections.may_wait, due.values()))
        if not due or (running is not None and beside and may_wait):
            return None
        self._sequences.background.give_up()
        is_beside = beside and may_wait
        with shielded():  # or ctrl-C might leave copies that nobody knows
            copies = self._sequences.fork_to_correct(due)
            layers = self._layers(due, list(copies.values()), is_beside)
            running = BackgroundCorrection(
                due, copies, layers, corrections.steps_beside, is_beside=is_beside
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
                pool=self._pool,
                device_budget_bytes=self._config.max_memory.get(self._device.index or 0),
                give_back=None if beside else partial(self._give_back, list(due)),
            )
        )
