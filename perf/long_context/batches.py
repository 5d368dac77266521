"""What each step of training reads: made by processes beside the GPU, the same for every run."""

from __future__ import annotations

import random
import signal
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perf.long_context.sample import Sample
from perf.long_context.tasks import TASKS, TaskMaker
from perf.long_context.text import read_corpus

_LINE_TOKENS = 32_768  # of a micro-batch
_AHEAD = 4  # steps
_FEWEST = 512  # tokens of a document, when lengths are divided
# Micro-batches of a step: what they are for, and the lengths of their documents to choose from.
PLAN = (
    ("tasks", (32_768,)),
    ("tasks", (32_768,)),
    ("tasks", (24_576, 32_768)),
    ("tasks", (12_288, 16_384)),
    ("tasks", (6_144, 8_192)),
    ("tasks", (2_048, 4_096)),
    ("text", (8_192, 16_384, 32_768)),
    ("keep", (1_024, 1_024, 8_192)),
)
_maker: TaskMaker | None = None  # of a worker process


@dataclass(frozen=True)
class MicroBatch:
    """Documents of one length.

    Attributes:
        purpose: "tasks" and "text" have a loss of their own; "keep" is compared with the stock
            model.
        tokens: int64 [batch, length], padded at the end.
        weights: float32 [batch, length], of predicting each token.
        kinds: of the documents.
    """

    purpose: str
    tokens: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    kinds: tuple[str, ...]


def steps(
    first: int, seed: int, tokenizer: Path, corpus: Path, scale: int, workers: int
) -> Generator[list[MicroBatch], None, None]:
    """Endless steps from number `first`; those of a resumed run are the ones it did not see.

    Args:
        scale: divides lengths and sizes, for trying things out.
    """
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer, corpus))
    try:
        queue: list[list[Future[MicroBatch]]] = []
        number = first
        while True:
            while len(queue) < _AHEAD:
                queue.append(
                    [pool.submit(_make, seed, number, place, scale) for place in range(len(PLAN))]
                )
                number += 1
            yield [future.result() for future in queue.pop(0)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(tokenizer: Path, corpus: Path) -> None:
    global _maker
    for number in (signal.SIGTERM, signal.SIGINT):  # which are for the run, not for its workers
        signal.signal(number, signal.SIG_IGN)
    _maker = TaskMaker(tokenizer, read_corpus(corpus)["train"])


def _make(seed: int, step: int, place: int, scale: int) -> MicroBatch:
    assert _maker is not None
    rng = random.Random(f"{seed}-{step}-{place}")
    purpose, lengths = PLAN[place]
    length = max(_FEWEST, rng.choice(lengths) // scale)
    count = _LINE_TOKENS // scale // length // (2 if purpose == "keep" else 1)
    samples = [_sample(rng, purpose, length) for _ in range(max(1, count))]
    tokens = np.full((len(samples), length), _maker.end, np.int64)
    weights = np.zeros((len(samples), length), np.float32)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
        weights[row, : len(sample.tokens)] = sample.weights
    weights[:, 0] = 0.0  # nothing predicts the first token
    return MicroBatch(purpose, tokens, weights, tuple(sample.kind for sample in samples))


def _sample(rng: random.Random, purpose: str, length: int) -> Sample:
    assert _maker is not None
    if purpose != "tasks":
        return _maker.text(rng, length)
    while True:
        # Documents do not all fill their row: their lengths are spread down to three quarters.
        room = length if rng.random() < 0.5 else rng.randint(length * 3 // 4, length)
        sample = _maker.task(rng, rng.choices(list(TASKS), list(TASKS.values()))[0], room)
        if len(sample.tokens) <= length and max(sample.weights) > 0:
            return sample  # questions of a short document may not leave room
