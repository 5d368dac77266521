"""The forward passes of an engine, by `offload.runtime.runner`: a slice of a prompt or of a
correction, or one token of each running sequence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from offload.decode.sampling import Sampler
from offload.engine.sampler import Chosen, score
from offload.models.batch import RaggedBatch
from offload.runtime.correcting import RunningCorrection
from offload.runtime.runner import Pass
from offload.runtime.runtime import Runtime
from offload.system.autocast import current_device, without_autocast
from offload.system.interrupts import finish
from offload.system.torch_threads import torch_threads


class Passes:
    """Runs the sequences of requests, of `runtime`, whose `run_lock` the caller has.

    Attributes:
        seconds: of all passes so far.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.seconds = runtime, 0.0
        self._runner, self._sequences = runtime.runner, runtime.sequences
        self.give_up = self._sequences.give_up_correction

    def wait(self) -> None:
        """For what a GPU was given."""
        if self.runtime.device.type == "cuda":
            torch.cuda.current_stream(self.runtime.device).synchronize()

    def read(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        *,
        builds: bool,
        between: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """Read some more of prompts: of each, hidden states [num_tokens, hidden_size] for `logits`.

        Args:
            parts: sequences, and their next tokens.
            builds: a GPU builds what the policy keeps: some prompt is read to its end.
            between: called between two layers, when a GPU has finished all but the last that it was
                given; other sequences may decode in there.

        Raises:
            HostBudgetError, RuntimeError, ValueError: as `Runtime.run`; all are as before.
        """
        if self.runtime.device.type == "cuda":
            between = _paced(between)
        ids = torch.tensor([token for _, tokens in parts for token in tokens])
        seqs, sizes = [seq for seq, _ in parts], [len(tokens) for _, tokens in parts]
        batch = _batch_of([self.runtime.store.kv_len(seq) for seq in seqs], sizes)
        with self._running():
            this = Pass(self._sequences, seqs, sizes)
            hidden = finish(self._runner.read(this, batch, ids, builds=builds), between)
        return tuple(hidden[start:stop] for start, stop in pairwise(batch.indptr))

    def correction(self, seq: int) -> RunningCorrection | None:
        """What is read again before the next token of `seq`; None: it is not due."""
        corrections = self._sequences.corrections
        if corrections is None or not corrections.are_due([seq]):
            return None
        return RunningCorrection({seq: corrections.waiting(seq).part()})

    def correct(self, seq: int, correction: RunningCorrection, num_tokens: int) -> None:
        """Read the next `num_tokens` of it; behind the last it is done.

        Raises:
            As `read`. `seq` is as it was; what was read before has to be given up.
        """
        with self._running(self.runtime.current_generation.prefill_threads):
            self._runner.corrector.read_slice(seq, correction, num_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float logits [n, vocab_size] of the tokens after those that were read."""
        with self._running():
            return self._runner.logits(hidden, "prefill")

    def chosen(self, logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
        """The tokens of logits [n, vocab_size], as a step chooses them: -1 where they are not
        finite."""
        if not samplers:
            return []
        with self._running():
            return self._runner.first_tokens(logits, samplers).tolist()

    def scores(
        self, hidden: Tensor, tokens: Sequence[int], num_likeliest: int
    ) -> tuple[Chosen, ...]:
        """Scores of the tokens that follow those that were read. Logits are large, so they are
        computed for one token at a time."""
        rows = zip(hidden, tokens, strict=False)  # nothing follows the prompt's last
        return tuple(score(self.logits(row[None])[0], token, num_likeliest) for row, token in rows)

    def logits_after(
        self, seqs: Sequence[int], tokens: Sequence[int], budgets: Mapping[int, int]
    ) -> Tensor:
        """Logits [n, vocab_size] of what follows the last `tokens` of sequences, which are in the
        cache afterwards.

        Args:
            budgets: as of `DecodeAttention`.

        Raises:
            As `Decoder.decode`; all sequences are as before.
        """
        batch = _batch_of([self.runtime.store.kv_len(seq) for seq in seqs], [1] * len(seqs))
        with self._decoding(budgets):
            this = Pass(self._sequences, seqs, batch.num_new_tokens)
            return self._runner.decode_tokens(this, batch, torch.tensor(tokens))

    def choose(
        self,
        seqs: Sequence[int],
        tokens: Sequence[int],
        samplers: Sequence[Sampler],
        budgets: Mapping[int, int],
        most: int,
        take: Callable[[list[int]], bool],
    ) -> None:
        """Decode tokens, of each sequence one in a step.

        Args:
            tokens: the last of each sequence, which are in the cache afterwards.
            samplers: of each; greedy ones, unless steps draw (`samples`).
            budgets: as of `DecodeAttention`.
            most: steps, where several had best follow each other.
            take: told of the tokens of each step, -1 where logits were not finite; whether another
                step may follow. It must not wait for the GPU.

        Raises:
            As `Decoder.decode`; all sequences are as before the step that failed.
        """
        positions = torch.tensor([self.runtime.store.kv_len(seq) for seq in seqs])
        with self._decoding(budgets):
            self._runner.choose_tokens(
                lambda batch: Pass(self._sequences, seqs, batch.num_new_tokens),
                seqs, torch.tensor(tokens), positions, samplers, most,
                lambda chosen, _: take(chosen[:, 0].tolist()),
            )  # fmt: skip

    @contextlib.contextmanager
    def _decoding(self, budgets: Mapping[int, int]) -> Iterator[None]:
        # Little work of torch's lies between the kernels, and a second thread of its would wait for
        # a CPU on which one of our workers still spins (`Runtime.generation`).
        attention = self.runtime.attention
        with self._running(num_threads=1):
            attention.budgets = budgets
            try:
                yield
            finally:
                attention.budgets = {}

    @contextlib.contextmanager
    def _running(self, num_threads: int | None = None) -> Iterator[None]:
        """Around passes, whose `seconds` count; torch has so many threads, None: as before."""
        start, before, device = time.perf_counter(), self.seconds, self.runtime.device
        try:
            with (
                torch.no_grad(),
                torch_threads(num_threads),
                current_device(device),
                without_autocast(device),
            ):
                yield
        finally:  # passes in the middle of this one are part of it
            self.seconds = before + time.perf_counter() - start


class GenericPasses(Passes):
    """Those of a model that runs on its own stock modules. What reading a prompt leaves for
    `logits` are the last token's logits themselves.
    """

    def read(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        *,
        builds: bool,
        between: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """As of `Passes`, but [1, vocab_size]; `between` is called behind layers of the store."""
        with self._running():
            runner: Any = self.runtime.runner
            logits: tuple[Tensor, ...] = runner.read(parts, between)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that were read."""
        return hidden


def _batch_of(firsts: Sequence[int], sizes: Sequence[int]) -> RaggedBatch:
    """So many tokens of each sequence, behind its first ones."""
    spans = zip(firsts, sizes, strict=True)
    num_tokens = sum(sizes)
    return RaggedBatch(
        indptr=[0, *accumulate(sizes)],
        columns=torch.arange(num_tokens),
        position_ids=torch.cat([torch.arange(first, first + size) for first, size in spans]),
        sequence_of_row=[*range(len(sizes))],
        rows_shape=(1, num_tokens),
    )


def _paced(between: Callable[[], None]) -> Callable[[], None]:
    """On a GPU, which would be given all layers before it has come to the second: at most one is
    queued behind the one that runs, so that there is time between them."""
    launched: list[torch.cuda.Event] = []

    def paced() -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        launched.append(event)
        if len(launched) > 1:
            launched.pop(0).synchronize()
        between()

    return paced
