"""RULER's variable tracking: which variables have a value, by a chain of assignments in noise.

Ported from NVIDIA's RULER (Apache-2.0, Copyright 2024 NVIDIA CORPORATION) by way of lm-eval 0.4.13,
whose samples these are, draw for draw; its spelling, too.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offload.bench.eval.fit import first_fitting, grown
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
    task: str,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_tokens: CountTokens,
    num_hops: int = NUM_HOPS,
) -> list[Sample]:
    """Samples of `vt`, or of one with shorter chains.

    Args:
        num_hops: links of the chain behind its first variable.

    Raises:
        TooShort: `length` has no room for the worked example and a chain.
    """
    draws = _Draws(random.Random(seed), np.random.RandomState(seed))

    def sized(is_example: bool, step: int, room: int) -> Callable[[], tuple[str, list[str]]]:
        """What draws a text that fits, with as much noise as did at first."""

        def draw(size: int) -> tuple[str, list[str]]:
            return _draw(draws, is_example, size, num_hops)

        def tokens_of(size: int) -> int:
            text, names = draw(size)
            return count_tokens(f"{text} {names}")

        size = grown(step, step, room, tokens_of)

        def draw_fitting() -> tuple[str, list[str]]:
            found = first_fitting(draw, size, step, 1, lambda drawn: count_tokens(drawn[0]) <= room)
            if found is None:
                raise TooShort(task, length)
            return found

        return draw_fitting

    text, names = sized(True, _EXAMPLE_STEP, _EXAMPLE_TOKENS - MAX_NEW_TOKENS)()
    example = text + " " + " ".join(names) + "\n\n"
    draw = sized(False, _STEP, length - MAX_NEW_TOKENS - count_tokens(example))
    samples = []
    for index in range(num_samples):
        text, names = draw()
        text = _with_other_names(example, draws) + "\n\n" + text
        cut = text.rfind(" Answer: According to the chain(s) of variable assignment")
        question, prefix = text[:cut], text[cut:].strip()
        samples.append(Sample(task, length, index, question, prefix, tuple(names), MAX_NEW_TOKENS))
    return samples


def _draw(draws: _Draws, is_example: bool, size: int, num_hops: int) -> tuple[str, list[str]]:
    """The text with its answer's beginning, and the variables of the chain."""
    letters = 3 if is_example else 5
    names = [draws.name(letters) for _ in range(num_hops + 1)]
    while len(set(names)) < num_hops + 1:
        names.append(draws.name(letters))
    value = draws.values.randint(10000, 99999)
    names = names[: num_hops + 1]
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(num_hops)]
    lines = [NOISE] * size
    if len(lines) <= len(chain):
        parts = [part for line in lines for part in line.split(".")]
        lines = [part + "." if part.strip() else part for part in parts]
    places = sorted(draws.names.sample(range(len(lines)), len(chain)))
    for i, (place, link) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + i, link)
    context = " ".join(lines).replace(". \n", ".\n")
    text = (QUESTION + ANSWER).format(context=context, query=value, num_v=num_hops + 1)
    return text, names


def _with_other_names(example: str, draws: _Draws) -> str:
    """The worked example with new names of its variables."""
    cut = example.index(ANSWER[-10:]) + 10
    for name in example[cut:].split():
        example = example.replace(name, draws.name(len(name)))
    return example
