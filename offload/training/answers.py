"""Made questions over real text, whose answers are to be looked up in it.

The texts are the docstrings and sources of Python's library, which every machine has; the wording
is none of an evaluation's. Several kinds, as roles have to be right for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offload.system.stdlib_text import stdlib_docstrings, stdlib_sources

MIN_PROMPT_TOKENS = 1024  # shorter ones have no room for the facts and the question
_HELD_OUT = 0.2  # of the texts, at their end
_DECODED_QUESTIONS = 0.25  # of those that may be decoded
_PAD = 0
_THINGS = ("locker", "vault", "garden", "ship", "archive", "station", "workshop", "library")
_KINDS_OF_NUMBER = ("code", "number", "password", "registration", "invoice total", "serial")
_CITIES = ("Lisbon", "Nairobi", "Oslo", "Quito", "Hanoi", "Tbilisi", "Perth", "Dakar", "Riga")


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class _Asked:
    """Sentences to be hidden in the text, the question behind it, and its answer."""

    sentences: list[str]
    question: str
    answer: str


class AnswerTexts:
    """Examples without end, the same for the same numbers.

    Args:
        tokenizer: of transformers; its chat template frames the question, if it has one.
        prompt_tokens: of every prompt.
        max_answer_tokens: longer answers are cut.
        max_question_tokens: a fourth of the questions of at most so many tokens, frame included,
            are no part of the prompt: they come before the answer, as if they were decoded. Not
            where texts are held out.

    Raises:
        ValueError: fewer than MIN_PROMPT_TOKENS tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_tokens: int,
        max_answer_tokens: int = 40,
        max_question_tokens: int = 0,
    ) -> None:
        if prompt_tokens < MIN_PROMPT_TOKENS:
            raise ValueError(
                f"prompts of {prompt_tokens} tokens have no room for facts and questions; ask for "
                f"at least {MIN_PROMPT_TOKENS}"
            )
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self.max_answer_tokens = max_answer_tokens
        self._max_question_tokens = max_question_tokens
        self._before, self._after = _frame(tokenizer)
        self._texts = [
            self._encode(text)
            for text in ("\n\n".join(stdlib_docstrings()), "\n\n".join(stdlib_sources()[:24]))
        ]

    def batch(self, size: int, seed: int, *, held_out: bool = False) -> list[Example]:
        """So many examples; those of one batch have different kinds, where there are enough.

        Args:
            held_out: over the part of the texts that others are not over.
        """
        rng = random.Random(f"{seed} {held_out}")
        kinds = rng.sample(_KINDS * -(-size // len(_KINDS)), size)
        return [self._example(kind, rng, held_out) for kind in kinds]

    def _example(
        self, kind: Callable[..., _Asked] | None, rng: random.Random, held_out: bool
    ) -> Example:
        text = self._window(rng, held_out)
        if kind is None:  # the text goes on
            start = self.max_answer_tokens
            return Example(text[:-start][-self._prompt_tokens :], text[-start:])
        if kind is _recite:
            start = rng.randrange(self._prompt_tokens // 8, self._prompt_tokens * 5 // 8)
            passage = text[start : start + 16 + self.max_answer_tokens]
            begin = self._tokenizer.decode(passage[:16])
            asked = _Asked([], f"Write down how the passage goes on that begins with: {begin}", "")
            answer = passage[16:]
        else:
            asked = kind(rng)
            answer = self._encode(asked.answer)
        behind = self._encode(f"\n\n{asked.question}") + self._after
        decoded: list[int] = []
        may_be = len(behind) <= self._max_question_tokens and not held_out
        if may_be and rng.random() < _DECODED_QUESTIONS:
            decoded, behind = behind, decoded
        hidden = [self._encode(f" {sentence}\n") for sentence in asked.sentences]
        room = self._prompt_tokens - len(behind) - len(self._before) - sum(map(len, hidden))
        # Far from the question, however deep: the last eighth hides nothing.
        places = sorted(rng.randrange(room * 7 // 8) for _ in hidden)
        prompt, at = list(self._before), 0
        for place, sentence in zip(places, hidden, strict=True):
            prompt += text[at:place] + sentence
            at = place
        prompt += text[at:room] + behind
        if decoded:
            return Example(prompt, decoded + answer[: self.max_answer_tokens])
        # Some of the answer is said already, as in many a prompt.
        said = rng.choice((0, 0, min(8, len(answer) // 3))) if kind is not _recite else 0
        prompt = [*prompt[: len(self._before)], *prompt[len(self._before) + said :], *answer[:said]]
        return Example(prompt, answer[said : said + self.max_answer_tokens])

    def _window(self, rng: random.Random, held_out: bool) -> list[int]:
        """Tokens of one of the texts, from somewhere; where it ends it begins again."""
        text = rng.choices(self._texts, (3, 1))[0]
        border = int(len(text) * (1 - _HELD_OUT))
        part = text[border:] if held_out else text[:border]
        length = self._prompt_tokens + self.max_answer_tokens
        start = rng.randrange(len(part))
        repeated = part[start:] + part * (1 + length // len(part))
        return repeated[:length]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """int64 [batch, prompt + longest answer], and bool [batch, longest answer] of what is there."""
    longest = max(len(example.answer) for example in examples)
    rows = [[*x.prompt, *x.answer, *[_PAD] * (longest - len(x.answer))] for x in examples]
    lengths = torch.tensor([len(example.answer) for example in examples])
    return torch.tensor(rows), torch.arange(longest) < lengths[:, None]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens before and after what a user says, up to where the model answers."""
    if getattr(tokenizer, "chat_template", None):
        mark = "@@said@@"
        framed = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        before, after = framed.split(mark)
    else:
        before, after = tokenizer.bos_token or "", "\nAnswer:"
    encoded = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return encoded[0], encoded[1]


def _name(rng: random.Random) -> str:
    """A word that no text has told anything about."""
    syllables = [
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3)))
    ]
    return "".join(syllables) + rng.choice(("n", "r", "s", "l", ""))


def _names(rng: random.Random, count: int) -> list[str]:
    names: set[str] = set()
    while len(names) < count:
        names.add(_name(rng))
    return rng.sample(sorted(names), count)


def _value(rng: random.Random) -> str:
    return rng.choice(
        (
            str(rng.randint(10**5, 10**8)),
            f"{rng.getrandbits(48):012x}",
            "-".join(str(rng.randint(100, 999)) for _ in range(3)),
            f"{rng.choice(_CITIES)} at {rng.randint(1, 12)}:{rng.randint(10, 59)}",
        )
    )


def _one_of_many(rng: random.Random) -> _Asked:
    """One or several of many facts."""
    thing, what = rng.choice(_THINGS), rng.choice(_KINDS_OF_NUMBER)
    facts = [(name, _value(rng)) for name in _names(rng, rng.choice((1, 2, 4, 8, 16)))]
    told = [f"The {what} of the {name} {thing} is {value}." for name, value in facts]
    asked = rng.sample(facts, min(len(facts), rng.choice((1, 1, 2, 3))))
    question = " and ".join(f"the {name} {thing}" for name, _ in asked)
    answer = " ".join(f"The {what} of the {name} {thing} is {value}." for name, value in asked)
    return _Asked(told, f"What is the {what} of {question}?", answer)


def _several_values(rng: random.Random) -> _Asked:
    """All facts of one name, among those of others."""
    thing, what = rng.choice(_THINGS), rng.choice(_KINDS_OF_NUMBER)
    names = _names(rng, 3)
    values = [str(rng.randint(10**4, 10**7)) for _ in range(rng.choice((2, 3, 4)))]
    told = [f"One {what} for the {names[0]} {thing} is: {value}." for value in values]
    others = [f"One {what} for the {name} {thing} is: {_value(rng)}." for name in names[1:]]
    answer = f"They are {', '.join(values)}."
    question = f"List every {what} for the {names[0]} {thing} that the text tells."
    return _Asked([*told, *others], question, answer)


def _assignment(rng: random.Random) -> _Asked:
    """What a variable of a program is."""
    names = _names(rng, rng.choice((1, 4, 8)))
    values = [f"{rng.getrandbits(48):012x}" for _ in names]
    told = [f'{name}_key = "{value}"' for name, value in zip(names, values, strict=True)]
    return _Asked(told, f"What does print({names[0]}_key) show?", f"{values[0]}")


def _chain(rng: random.Random) -> _Asked:
    """Who hands something on to whom."""
    names = [name.capitalize() for name in _names(rng, 6)]
    told = [f"{a} gave the parcel to {b}." for a, b in pairwise(names[:4])]
    told.append(f"{names[4]} gave the letter to {names[5]}.")
    answer = f"The parcel went from {names[0]} to {', '.join(names[1:4])}."
    return _Asked(told, f"Who had the parcel that was first {names[0]}'s? Name them all.", answer)


def _recite(rng: random.Random) -> _Asked:
    """A passage of the text itself: `AnswerTexts` makes it."""
    raise NotImplementedError


_KINDS: tuple[Callable[[random.Random], _Asked] | None, ...] = (
    *(_one_of_many, _one_of_many, _several_values, _assignment, _chain, _recite),
    None,
)
