"""RULER's variable tracking: which variables have a value, by a chain of assignments in noise.

Ported from NVIDIA's RULER (Apache-2.0, Copyright 2024 NVIDIA CORPORATION) by way of lm-eval 0.4.13,
whose samples these are, draw for draw; its spelling, too.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

import numpy as np

from offload.bench.eval.sample import CountTokens, Sample, TooShort

QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above."
)
ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
    "variables are assgined the value {query}, they are: "
)
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
MAX_NEW_TOKENS = 30
NUM_HOPS = 4
_STEP = 10  # lines of noise
_EXAMPLE_TOKENS, _EXAMPLE_STEP = 500, 5


@dataclass(frozen=True)
class _Draws:
    """Two generators, because lm-eval draws values by NumPy's."""

    names: random.Random
    values: np.random.RandomState

    def name(self, letters: int) -> str:
        return "".join(self.names.choices(string.ascii_uppercase, k=letters))


def tracking_samples(
    task: str, length: int, num_samples: int, *, seed: int, count_tokens: CountTokens
) -> list[Sample]:
    """Samples of `vt`.

    Raises:
        TooShort: `length` has no room for the worked example and a chain.
    """
    draws = _Draws(random.Random(seed), np.random.RandomState(seed))
    size = _largest(draws, True, _EXAMPLE_TOKENS, 0, count_tokens)
    text, names = _draw_fitting(task, draws, True, size, _EXAMPLE_TOKENS, 0, count_tokens)
    example = text + " " + " ".join(names) + "\n\n"

    example_tokens = count_tokens(example)
    size = _largest(draws, False, length, example_tokens, count_tokens)
    samples = []
    for index in range(num_samples):
        text, names = _draw_fitting(task, draws, False, size, length, example_tokens, count_tokens)
        text = _with_other_names(example, draws) + "\n\n" + text
        cut = text.rfind(" Answer: According to the chain(s) of variable assignment")
        samples.append(
            Sample(
                task, length, index, text[:cut], text[cut:].strip(), tuple(names), MAX_NEW_TOKENS
            )
        )
    return samples


def _largest(
    draws: _Draws, is_example: bool, length: int, beside: int, count_tokens: CountTokens
) -> int:
    """Lines of noise that fit `length` tokens, `beside` others among them."""
    step = _EXAMPLE_STEP if is_example else _STEP
    size, tokens = step, 0
    while tokens + MAX_NEW_TOKENS + beside < length:
        text, names = _draw(draws, is_example, size)
        tokens = count_tokens(f"{text} {names}")
        if tokens + MAX_NEW_TOKENS + beside > length:
            return size - step
        size += step
    return size


def _draw_fitting(
    task: str,
    draws: _Draws,
    is_example: bool,
    size: int,
    length: int,
    beside: int,
    count_tokens: CountTokens,
) -> tuple[str, list[str]]:
    step = _EXAMPLE_STEP if is_example else _STEP
    while size > 0:
        text, names = _draw(draws, is_example, size)
        if count_tokens(text) + MAX_NEW_TOKENS + beside <= length:
            return text, names
        size -= step
    raise TooShort(task, length)


def _draw(draws: _Draws, is_example: bool, size: int) -> tuple[str, list[str]]:
    """The text with its answer's beginning, and the variables of the chain."""
    letters = 3 if is_example else 5
    names = [draws.name(letters) for _ in range(NUM_HOPS + 1)]
    while len(set(names)) < NUM_HOPS + 1:
        names.append(draws.name(letters))
    value = draws.values.randint(10000, 99999)
    names = names[: NUM_HOPS + 1]
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(NUM_HOPS)]
    lines = [NOISE] * size
    if len(lines) <= len(chain):
        parts = [part for line in lines for part in line.split(".")]
        lines = [part + "." if part.strip() else part for part in parts]
    places = sorted(draws.names.sample(range(len(lines)), len(chain)))
    for i, (place, link) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + i, link)
    context = " ".join(lines).replace(". \n", ".\n")
    text = (QUESTION + ANSWER).format(context=context, query=value, num_v=NUM_HOPS + 1)
    return text, names


def _with_other_names(example: str, draws: _Draws) -> str:
    """The worked example with new names of its variables."""
    cut = example.index(ANSWER[-10:]) + 10
    for name in example[cut:].split():
        example = example.replace(name, draws.name(len(name)))
    return example
