"""RULER's word counts: the common words of a list, and the frequent ones of a coded text.

Ported from NVIDIA's RULER (Apache-2.0, Copyright 2024 NVIDIA CORPORATION) by way of lm-eval 0.4.13,
whose samples these are, draw for draw.
"""

from __future__ import annotations

import math
import random
import string
from functools import partial

import numpy as np

from offload.bench.eval.fit import first_fitting, grown
from offload.bench.eval.sample import CountTokens, Sample, TooShort
from offload.bench.eval.words import all_words

COMMON_QUESTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the {count} most common words in the above list?"
)
COMMON_ANSWER = "Answer: The top {count} words that appear most often in the list are:"
COMMON_NEW_TOKENS = 120
FREQUENT_QUESTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
FREQUENT_ANSWER = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
FREQUENT_NEW_TOKENS = 50
NUM_COMMON, COMMON_REPEATS = 10, 30
_STEP = 10  # words
_WORD_LETTERS = 6
_ORDER_SEED = 42  # of lists and coded words, always
_ZETA_2 = math.pi**2 / 6


def common_word_samples(
    task: str,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_tokens: CountTokens,
    num_common: int = NUM_COMMON,
    repeats: int = COMMON_REPEATS,
) -> list[Sample]:
    """Samples of `cwe`: 10 words stand in a list more often than the others; or of one with fewer.

    Args:
        num_common, repeats: words that stand there more often, and how often from 4,096 tokens on,
            where others stand three times.

    Raises:
        TooShort: `length` has no room for a list of as many words.
    """
    prefix = COMMON_ANSWER.format(count=num_common)
    rng, order = random.Random(seed), random.Random(_ORDER_SEED)
    words = all_words()
    order.shuffle(words)

    def list_words(num_words: int, common_repeats: int, others: int) -> tuple[str, list[str]]:
        drawn = rng.sample(words, num_words)
        common = drawn[:num_common]
        shuffled = common * common_repeats + drawn[num_common:] * others
        order.shuffle(shuffled)
        return _numbered(shuffled), common

    def draw(num_words: int) -> tuple[str, str, list[str]]:
        """(worked example, which only moves the generators; text; answer)."""
        short = length < 4096
        example, common = list_words(*((20, 3, 1) if short else (40, 10, 3)))
        context, answer = list_words(num_words, *((6, 1) if short else (repeats, 3)))
        text = _common_text(context, num_common)
        example = f"{_common_text(example, num_common)}{_numbered(common)}"
        return example, text, answer

    def tokens_of(num_words: int) -> int:
        example, text, answer = draw(num_words)
        return count_tokens(f"{example}\n{text} {_numbered(answer)}")

    room = length - COMMON_NEW_TOKENS
    size = grown(_STEP, _STEP, room, tokens_of, most=len(words))
    samples = []
    for index in range(num_samples):
        drawn = first_fitting(draw, size, _STEP, num_common, lambda x: count_tokens(x[1]) <= room)
        if drawn is None:
            raise TooShort(task, length)
        _, text, answer = drawn
        question = text[: text.rfind(" " + prefix)].strip()
        outputs = tuple(answer)
        samples.append(
            Sample(task, length, index, question, prefix, outputs, COMMON_NEW_TOKENS, "\n\n")
        )
    return samples


def _common_text(context: str, count: int) -> str:
    question = COMMON_QUESTION.format(context=context, count=count)
    return f"{question} {COMMON_ANSWER.format(count=count)}"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i + 1}. {word}" for i, word in enumerate(words))


def frequent_word_samples(
    task: str, length: int, num_samples: int, *, seed: int, count_tokens: CountTokens
) -> list[Sample]:
    """Samples of `fwe`: coded words whose counts fall as the square of their rank.

    Raises:
        TooShort: `length` has no room for the three words.
    """
    rng, vocab_size, step = random.Random(seed), length // 50, length // 32

    def coded_words() -> list[str]:
        def word() -> str:
            return "".join(rng.choices(string.ascii_lowercase, k=_WORD_LETTERS))

        vocab = [word() for _ in range(vocab_size)]
        while len(set(vocab)) < vocab_size:
            vocab.append(word())
        vocab = sorted(set(vocab))
        random.Random(_ORDER_SEED).shuffle(vocab)
        vocab[0] = "..."  # the most frequent is noise
        return vocab

    def text_of(vocab: list[str], num_words: int) -> str:
        counts = num_words * (np.arange(1, len(vocab) + 1) ** -2.0) / _ZETA_2
        coded = [
            word
            for word, count in zip(vocab, counts.astype(int).tolist(), strict=True)
            for _ in range(count)
        ]
        random.Random(_ORDER_SEED).shuffle(coded)
        return f"{FREQUENT_QUESTION.format(context=' '.join(coded))} {FREQUENT_ANSWER}"

    if vocab_size < 4:
        raise TooShort(task, length)
    size, vocab = length // _WORD_LETTERS, coded_words()
    while count_tokens(text_of(vocab, size)) < length:
        size += step
    size -= step
    samples = []
    for index in range(num_samples):
        vocab = coded_words()
        draw = partial(text_of, vocab)
        text = first_fitting(draw, size, step, 1, lambda x: count_tokens(x) <= length)
        if text is None:
            raise TooShort(task, length)
        question = text[: text.rfind(" " + FREQUENT_ANSWER)].strip()
        answer = tuple(vocab[1:4])
        samples.append(
            Sample(task, length, index, question, FREQUENT_ANSWER, answer, FREQUENT_NEW_TOKENS)
        )
    return samples
