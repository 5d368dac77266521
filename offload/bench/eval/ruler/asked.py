"""Needles that a question in the answer itself asks for, so that it is decoded under the policy.

The wording is RULER's (`niah`). What is asked is not known while the prompt is read: a policy that
goes by what the prompt has looked at has nothing to go by.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from offload.bench.eval.fit import first_fitting, largest
from offload.bench.eval.ruler.niah import NEEDLE, among_sentences, sentences_of
from offload.bench.eval.sample import CountTokens, Sample, TooShort
from offload.bench.eval.words import needle_words

READ = (
    "Some special magic {kinds} are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about them afterwards.\n{context}\n"
)
QUIZ = "I will ask for special magic {kinds}. Answer each question from the provided text."
QUESTION = (
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
TWO_STEPS = (
    "What is the special magic number for the special magic word for {key}? First find the word, "
    "then the number for that word."
)
MAX_NEW_TOKENS = 128
_QUESTION_TOKENS = 64  # of a question with its answer, at most
_WORD_STEP, _LINE_STEP = 20, 5  # by which a haystack grows


@dataclass(frozen=True)
class Quiz:
    """A task.

    Attributes:
        haystack: `prose`, or `needle` (other needles).
        num_keys: that are hidden.
        num_questions: one after another, each when the one before was answered; the last
            `num_judged` count.
        two_steps: the question is for the number of the word of a key: the model finds the word,
            and asks itself for its number.
    """

    haystack: str = "prose"
    num_keys: int = 8
    num_questions: int = 1
    num_judged: int = 1
    two_steps: bool = False

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer, which repeats the questions."""
        return MAX_NEW_TOKENS + _QUESTION_TOKENS * (self.num_questions - 1)


TASKS = {
    "asked": Quiz(),
    "asked_lines": Quiz("needle", num_keys=1),
    "two_steps": Quiz(num_keys=4, two_steps=True),
    "asked_long": Quiz(num_keys=56, num_questions=56, num_judged=8),
}


def asked_samples(
    task: str,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_tokens: CountTokens,
    prose: Sequence[str],
) -> list[Sample]:
    """Samples of one of `TASKS`; arguments and errors as of `needle_samples`."""
    kind, rng = TASKS[task], random.Random(seed)
    is_prose = kind.haystack == "prose"
    room = length - kind.new_tokens - _QUESTION_TOKENS  # the first one is in the prompt
    if room < 1:
        raise TooShort(task, length)

    step = _WORD_STEP if is_prose else _LINE_STEP

    def fits(steps: int) -> bool:
        text = _draw(kind, steps * step, random.Random(seed), prose)[0]
        if not is_prose or steps * step <= len(prose):
            return count_tokens(text) <= room
        if (tokens := count_tokens(text)) <= room:
            raise ValueError(
                f"{task}: the haystack's {len(prose):,} words are {tokens:,} tokens, too few for "
                f"{length:,}; give more text by --haystack, or lower --context"
            )
        return False

    size = step * largest(room, fits)
    samples = []
    for index in range(num_samples):
        fitting = first_fitting(
            lambda n: _draw(kind, n, rng, prose),
            size,
            step,
            1,
            lambda drawn: count_tokens(drawn[0]) <= room,
        )
        if fitting is None:
            raise TooShort(task, length)
        text, prefix, questions, outputs = fitting
        samples.append(
            Sample(
                task,
                length,
                index,
                text,
                prefix,
                outputs,
                kind.new_tokens,
                decodes_prefix=not kind.two_steps,
                questions=questions,
            )
        )
    return samples


def _draw(
    kind: Quiz, size: int, rng: random.Random, prose: Sequence[str]
) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """(text, beginning of the answer, questions in the answer, right answers) with a haystack of
    `size` words of prose, or lines."""
    words: list[str] = []
    while len(words) < 2 * kind.num_keys:
        word = rng.choice(needle_words())
        words += [word] * (word not in words)
    keys, others = words[: kind.num_keys], words[kind.num_keys :]
    numbers = [_number(rng) for _ in keys]
    numbered = others if kind.two_steps else keys
    needles = [_needle("numbers", *pair) for pair in zip(numbered, numbers, strict=True)]
    if kind.two_steps:
        needles += [_needle("words", *pair) for pair in zip(keys, others, strict=True)]
    rng.shuffle(needles)
    if kind.haystack == "prose":
        context = among_sentences(needles, sentences_of(" ".join(prose[:size])), rng)
    else:
        lines = [_needle("numbers", rng.choice(needle_words()), _number(rng)) for _ in range(size)]
        for needle in needles:
            lines.insert(rng.randrange(len(lines) + 1), needle)
        context = "\n".join(lines)
    kinds = "words and numbers" if kind.two_steps else "numbers"
    text = READ.format(kinds=kinds, context=context)
    if kind.two_steps:
        prefix = f"The special magic word for {keys[0]} mentioned in the provided text is"
        then = ". The special magic number for {said} mentioned in the provided text is"
        return text + TWO_STEPS.format(key=keys[0]), prefix, (then,), (numbers[0],)
    asked = [QUESTION.format(kind="number", key=key) for key in keys[: kind.num_questions]]
    outputs = tuple(numbers[: kind.num_questions][-kind.num_judged :])
    further = tuple(f". {question}" for question in asked[1:])
    return text + QUIZ.format(kinds=kinds), asked[0], further, outputs


def _needle(kinds: str, key: str, value: str) -> str:
    return NEEDLE.format(type_needle_v=kinds, key=key, value=value)


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))
