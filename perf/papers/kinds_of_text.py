"""Prompts of several kinds, long and short, from text that every machine has.

What is best for one prompt, or for one kind of text, is not best: claims are asked of all of them.
"""

from __future__ import annotations

import random
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from offload import load_tokenizer
from offload.bench.eval.haystack import prose_words
from offload.bench.eval.needle import depth_samples
from offload.bench.eval.perplexity import Window
from offload.bench.eval.prompt import prompt_counter
from offload.bench.eval.ruler import ruler_samples
from offload.bench.eval.sample import Sample
from offload.bench.eval.structured import structured_samples
from offload.system.memory import available_cpus
from offload.system.stdlib_text import stdlib_paragraphs

MODEL = "smollm2-135m-instruct-32k"
# Text that goes on by itself; and what a question is asked about.
WINDOWS = ("prose", "source")
QUESTIONS = ("needle", "keys", "json", "tracking")
KINDS = (*WINDOWS, *QUESTIONS)
DESCRIPTIONS = {
    "prose": "docstrings of Python's library",
    "source": "source files of Python's library",
    "needle": "a number in prose, at any depth",
    "keys": "one of many numbers (RULER's niah_multikey_2)",
    "json": "an object of a JSON document, to repeat",
    "tracking": "RULER's variable tracking",
}
DECODED_TOKENS = 32  # of a window
ANSWER_TOKENS = {"needle": 12, "keys": 12, "json": 40, "tracking": 30}
_RULER = {"keys": "niah_multikey_2", "tracking": "vt"}
_SOURCE_CHARACTERS_PER_TOKEN = 4  # fewer than the tokenizer needs for code

Item = Sample | Window


def make_item(kind: str, length: int, seed: int) -> Item:
    """The prompt of a kind and seed, with what comes after it at most `length` tokens.

    Raises:
        ValueError: a length beyond the text that there is.
    """
    tokenizer, rng = load_cached_tokenizer(), random.Random(f"{seed} {kind} {length}")

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    if kind in WINDOWS:
        tokens = _prose_tokens() if kind == "prose" else _source_tokens(length, rng)
        if len(tokens) < length:
            raise ValueError(f"{kind} has {len(tokens):,} tokens, too few for {length:,}")
        first = rng.randrange(len(tokens) - length + 1)
        return Window(length - DECODED_TOKENS, seed, tokens[first : first + length], kind)
    if kind in _RULER:
        (sample,) = ruler_samples(
            _RULER[kind], length, 1, prose=[], seed=seed, count_tokens=count_tokens
        )
    else:
        common: dict[str, Any] = {
            "seed": seed,
            "count_prompt": prompt_counter(tokenizer, chat=True),
        }
        if kind == "needle":
            words = prose_words(None)
            (sample,) = depth_samples(rng.randrange(101), length, 1, prose=words, **common)
        else:
            (sample,) = structured_samples(kind, length, 1, **common)
    return replace(sample, task=kind, length=length, index=seed, max_new_tokens=ANSWER_TOKENS[kind])


def items_until(
    deadline: float,
    kinds: Sequence[str],
    lengths: Sequence[int],
    *,
    first_seed: int,
    most_rounds: int | None = None,
) -> Iterator[Item]:
    """Items of every kind and length, seed after seed, made ahead by other processes.

    They end after `most_rounds` seeds, or where `deadline` is past, on `time.monotonic()`.
    """
    rounds = count() if most_rounds is None else range(most_rounds)
    wanted = (
        (kind, length, first_seed + i) for i in rounds for length in lengths for kind in kinds
    )
    processes = max(1, available_cpus() // 8)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    ahead: deque[Future[Item]] = deque()
    try:
        while time.monotonic() <= deadline:
            for one in islice(wanted, 2 * processes - len(ahead)):
                ahead.append(pool.submit(make_item, *one))
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def length_of(item: Item) -> int:
    """Tokens that it was made for, those that are decoded included."""
    return item.length + (DECODED_TOKENS if isinstance(item, Window) else 0)


@cache
def load_cached_tokenizer() -> Any:
    """The model's."""
    return load_tokenizer(MODEL)


@cache
def _prose_tokens() -> list[int]:
    return _tokens_of("\n\n".join(stdlib_paragraphs()))


def _source_tokens(length: int, rng: random.Random) -> list[int]:
    """Of some files after one another, from one that is drawn."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    first, text = rng.randrange(len(files)), ""
    for file in files[first:] + files[:first]:
        text += file.read_text("utf-8", errors="replace")
        if len(text) > 2 * _SOURCE_CHARACTERS_PER_TOKEN * length:
            break
    return _tokens_of(text)


def _tokens_of(text: str) -> list[int]:
    tokens: list[int] = load_cached_tokenizer()(text, verbose=False)["input_ids"]
    return tokens
