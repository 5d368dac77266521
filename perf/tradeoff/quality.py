"""RULER under every policy, by several processes at once on one machine.

A process decodes on a few threads; one GPU may read the prompts of all. The parent alone writes the
file of answers, in the order of the samples, so that a run that is cut has about as many of each
task and length.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product, zip_longest
from multiprocessing.pool import IMapIterator
from typing import Any

from offload.bench.eval.record_file import RecordFile
from offload.bench.eval.sample import Sample, key_of
from offload.policies import Policy

Cell = tuple[int, str]  # length, task
_FAILURES = 4  # prompts that may fail before the run ends
Say = Callable[[str], None]


@dataclass(frozen=True)
class Judged:
    """What answers, and to what.

    Attributes:
        options: of `perf.bench_tradeoff`: what is asked, where answers are decoded, and for how
            long.
        labels: of the policies, full attention's "full" first.
    """

    options: argparse.Namespace
    policies: Sequence[Policy]
    labels: Sequence[str]


class _Process:
    """What one process keeps between prompts: tokenizer and prose, and once it answers a model."""

    def __init__(self, judged: Judged) -> None:
        from offload.bench.eval.haystack import prose_words
        from offload.loading.names import load_tokenizer

        self.judged = judged
        self._tokenizer: Any = load_tokenizer(judged.options.model)
        self._prose = prose_words(None)
        self._model: Any = None

    def make(self, cell: Cell) -> list[Sample]:
        """The samples of a task at a length."""
        from offload.bench.eval.prompt import text_counter
        from offload.bench.eval.ruler import ruler_samples

        length, task = cell
        return ruler_samples(
            task,
            length,
            self.judged.options.samples,
            seed=self.judged.options.seed,
            count_tokens=text_counter(self._tokenizer),
            prose=self._prose,
        )

    def answer(self, sample: Sample) -> tuple[Sample, dict[str, Any]]:
        """What every policy says to a prompt, as `offload eval ruler` records it."""
        from offload.bench.eval.answers import answer_sample
        from offload.bench.eval.prompt import uses_chat_template
        from offload.runtime.config import runtime_config
        from offload.runtime.shared_model import SharedModel

        options, labels = self.judged.options, self.judged.labels
        if self._model is None:
            config = runtime_config(
                dtype=options.dtype,
                device=options.quality_device,
                num_threads=options.quality_threads,
            )
            self._model = SharedModel(
                options.model, self.judged.policies, config, reads_on=options.reads_on
            )
        chat = uses_chat_template(self._tokenizer, None)
        return sample, answer_sample(self._model, labels, self._tokenizer, sample, chat=chat)


def answer_all(
    judged: Judged,
    file: RecordFile,
    say: Say,
    on_answer: Callable[[Sample], None] = lambda sample: None,
) -> None:
    """Have answered what `file` has no record of, until the time is up.

    Args:
        on_answer: called when `file` has another record.

    Raises:
        RuntimeError: some prompts were not answered; the others are in `file`.
    """
    options, end = judged.options, time.monotonic() + judged.options.seconds
    # The longest first: what is left at the end is short.
    cells = sorted(
        dict.fromkeys(product(options.lengths, options.tasks)), key=lambda cell: -cell[0]
    )
    done = file.keys
    with _processes(judged) as (make, answer):
        made = iter(make(cells))
        by_cell = [_next(made, end - time.monotonic()) for _ in cells]
        locked = chain.from_iterable(zip_longest(*by_cell))
        left = [x for x in locked if x is not None and key_of(x) not in done]
        say(f"prompts are made: {len(left)} of {sum(map(len, by_cell))} to be answered")
        answers, failures = iter(answer(left)), list[str]()
        for count in range(1, len(left) + 1):
            try:
                sample, measured = _next(answers, end - time.monotonic())
            except multiprocessing.TimeoutError:
                say(f"time is up: {count - 1} of {len(left)} prompts were answered")
                break
            if isinstance(measured, str):
                failures.append(measured)
                say(f"{sample.task}, {sample.length:,} tokens: {measured}")
                if len(failures) > _FAILURES:
                    break
                continue
            file.add(sample, measured)
            on_answer(sample)
            if count % max(1, len(left) // 8) == 0:
                say(f"{count} of {len(left)} prompts")
    if failures:
        raise RuntimeError(f"{len(failures)} prompts were not answered, the first: {failures[0]}")


def _next(of_processes: Iterator[Any], seconds: float) -> Any:
    """The next one, if it comes in time; in this process it takes as long as it takes.

    Raises:
        multiprocessing.TimeoutError: it does not.
    """
    if seconds <= 0:
        raise multiprocessing.TimeoutError("no prompt was ready; raise --seconds")
    if isinstance(of_processes, IMapIterator):
        return of_processes.next(timeout=seconds)
    return next(of_processes)


Map = Callable[[Iterable[Any]], Iterable[Any]]


@contextmanager
def _processes(judged: Judged) -> Iterator[tuple[Map, Map]]:
    """What makes the samples of cells, in order, and what answers samples, as they come."""
    if judged.options.processes == 1:
        own = _Process(judged)
        yield lambda cells: map(own.make, cells), lambda samples: map(own.answer, samples)
        return
    # Spawned: a fork would have this process's threads and its GPU in an unknown state.
    context = multiprocessing.get_context("spawn")
    with context.Pool(judged.options.processes, _begin, (judged,)) as pool:
        yield (
            lambda cells: pool.imap(_make, cells),
            lambda samples: pool.imap_unordered(_answer, samples),
        )


_process: _Process | None = None  # of a pool's process


def _begin(judged: Judged) -> None:
    global _process
    import torch

    torch.set_num_threads(judged.options.quality_threads)
    _process = _Process(judged)


def _make(cell: Cell) -> list[Sample]:
    assert _process is not None
    return _process.make(cell)


def _answer(sample: Sample) -> tuple[Sample, dict[str, Any] | str]:
    """What a policy says, or why it was not asked: not every error can be sent."""
    assert _process is not None
    try:
        return _process.answer(sample)
    except Exception as error:
        return sample, f"{type(error).__name__}: {error}"
