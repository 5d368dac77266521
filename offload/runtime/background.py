"""A correction beside the steps that come next: a layer of it begins with each of them.

While a GPU decodes a token with the old keys and values, the cached tokens of a layer come in, and
behind it the GPU reads those that wait through that layer. (At the same time they would not be
done sooner: a step leaves the GPU little, and its small kernels wait for large ones.) What is
written is in a copy of the sequence that shares the pages before, and takes their place between two
steps; what was decoded meanwhile waits for the next correction. How many steps that takes depends
on nothing but the number of layers, so that a generation gives the same tokens each time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from offload.models.batch import RaggedBatch
from offload.prefill.forward import prefill_by_layer
from offload.runtime.correcting import BackgroundCorrection, SparseTokens
from offload.runtime.model_loading import LoadedModel
from offload.runtime.sequences import Sequences
from offload.runtime.stats import OffloadStats
from offload.system.errors import DeviceMemoryError, HostBudgetError

logger = logging.getLogger(__name__)


class BackgroundReader:
    """Begins corrections of one model's sequences, and goes on with them.

    Args:
        opened: the model.
        sequences: which know what waits, and what runs (`Sequences.background`).
    """

    def __init__(self, opened: LoadedModel, sequences: Sequences) -> None:
        self._model, self._config, self._device = opened.lean, opened.config, opened.device
        self._sequences = sequences

    def running(self, seqs: Sequence[int], stats: OffloadStats) -> BackgroundCorrection | None:
        """What has to `go_on` beside the next step of `seqs`, which may begin or come to its end
        here. None: nothing; something may be due for which there is no room.

        Raises:
            ValueError: keys or values that are not finite. It is given up then.
        """
        while True:
            running = self._sequences.background
            if running is None:
                running = self._begin(seqs)
            if running is None or not running.copies.keys() <= set(seqs):
                return None
            if running.num_left and running.error is None:
                return running
            try:
                running.finish()
            except BaseException as error:
                self._sequences.give_up_background()
                if not isinstance(error, DeviceMemoryError):
                    raise
                logger.info("no correction beside the steps: %s", error)
                return None
            self._sequences.end_background()
            stats.corrected_tokens += running.num_tokens

    def _begin(self, seqs: Sequence[int]) -> BackgroundCorrection | None:
        """None: nothing is due, or the host's budget has no room for it."""
        corrections = self._sequences.corrections
        assert corrections is not None
        due = {seq: corrections.waiting(seq).copy() for seq in seqs if corrections.are_due([seq])}
        if not due:
            return None
        try:
            copies = self._sequences.fork_beside(due)
        except HostBudgetError as error:
            logger.info("no correction beside the steps: %s", error)
            return None
        layers = self._layers(due, list(copies.values()))
        num_steps = 1 + len(self._model.layers)  # cached tokens come in beside the first
        running = BackgroundCorrection(due, copies, layers, num_steps)
        self._sequences.background = running
        return running

    def _layers(
        self, due: dict[int, SparseTokens], copies: Sequence[int]
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
                device_budget_bytes=self._config.max_memory.get(self._device.index or 0),
            )
        )
