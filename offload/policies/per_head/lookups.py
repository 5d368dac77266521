"""Texts in which facts stand far from where they are asked for.

Several kinds of look-up, in prose that every machine has: a head that fetches facts does so for all
of them. The wording is none of an evaluation's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.system.stdlib_text import stdlib_prose

LOOKUP_TOKENS = 2048
MIN_LOOKUP_TOKENS = 1024  # shorter texts have no room for the facts, their questions and distance
_FACTS = 6  # of a text
_NAMES = [
    *("harbor", "lantern", "quartz", "meadow", "falcon", "copper", "violet", "engine", "ribbon"),
    *("tundra", "saddle", "mirror", "canyon", "walnut", "beacon", "velvet"),
]
_CITIES = [
    *("Lisbon", "Nairobi", "Oslo", "Quito", "Hanoi", "Tbilisi"),
    *("Perth", "Dakar", "Riga", "Lima", "Cairo", "Kyoto"),
]


@dataclass(frozen=True)
class _Kind:
    """How a fact is told and asked for; both end before the value."""

    told: str
    asked: str
    value: Callable[[random.Random], str]


_KINDS = (
    _Kind(
        "The code of the {name} locker is",
        "\nQuestion: what is the code of the {name} locker?\nAnswer: its code is",
        lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    ),
    _Kind("\n{name}_key =", "\n>>> print({name}_key)\n", lambda rng: f"{rng.getrandbits(64):016x}"),
    _Kind(
        "Note that the {name} team meets in",
        "\nWhere and when does the {name} team meet? They meet in",
        lambda rng: f"{rng.choice(_CITIES)} at {rng.randint(1, 12)}:{rng.randint(10, 59)}",
    ),
)
NUM_LOOKUP_TEXTS = len(_KINDS)


@dataclass(frozen=True)
class LookUp:
    """One answer of a text, and where it is to be found.

    Attributes:
        queries: positions whose next tokens are the answer's.
        fact: positions of the same tokens where they are told.
    """

    queries: range
    fact: range


def lookup_texts(tokenizer: Any, num_tokens: int) -> list[tuple[Tensor, list[LookUp]]]:
    """A text of each kind, int64 [about num_tokens], and its look-ups; always the same ones.

    Args:
        num_tokens: at most so many, at least MIN_LOOKUP_TOKENS.
    """
    rng = random.Random(0)
    room = len(_KINDS) * num_tokens
    prose = _encode(tokenizer, stdlib_prose(room))[:room]
    return [
        _lookup_text(kind, tokenizer, prose[i * num_tokens :], num_tokens, rng)
        for i, kind in enumerate(_KINDS)
    ]


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Longer than any prompt, and no model reads it: nothing to warn of.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _lookup_text(
    kind: _Kind, tokenizer: Any, prose: Sequence[int], num_tokens: int, rng: random.Random
) -> tuple[Tensor, list[LookUp]]:
    names = rng.sample(_NAMES, _FACTS)
    values = [_encode(tokenizer, " " + kind.value(rng)) for _ in names]
    told, asked = (
        [_encode(tokenizer, template.format(name=name)) for name in names]
        for template in (" " + kind.told, kind.asked)
    )
    dot = _encode(tokenizer, ".\n")
    of_facts = sum(len(x) for x in (*told, *asked, *values, *values)) + _FACTS * len(dot)
    room = num_tokens - of_facts
    # Far from the questions, however deep: the last sixth has none.
    places = sorted(rng.sample(range(room * 5 // 6), _FACTS))
    tokens: list[int] = []
    facts, before = [], 0
    for place, how, value in zip(places, told, values, strict=True):
        tokens += [*prose[before:place], *how]
        facts.append(range(len(tokens), len(tokens) + len(value)))
        tokens += [*value, *dot]
        before = place
    tokens += prose[before:room]
    found = []
    for i in rng.sample(range(_FACTS), _FACTS):
        tokens += asked[i]
        found.append(LookUp(range(len(tokens) - 1, len(tokens) + len(values[i]) - 1), facts[i]))
        tokens += values[i]
    return torch.tensor(tokens), found
