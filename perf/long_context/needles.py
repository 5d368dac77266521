"""What a document hides and is asked for: keys, values and facts, drawn from `words`."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from perf.long_context.words import (
    ADJECTIVES,
    ANSWERS,
    CITIES,
    FIRST_NAMES,
    INTRODUCTIONS,
    LAST_NAMES,
    MONTHS,
    NOUNS,
    QUESTIONS,
    RULER_NEEDLE,
)


@dataclass(frozen=True)
class Hidden:
    """What a document hides, and its questions: (question, answer) each."""

    needles: list[str]
    questions: list[tuple[str, str]]
    introduction: str
    noise: str | None = None  # instead of prose
    plain_form: tuple[str, str] | None = None


def num_rounds(rng: random.Random) -> int:
    return rng.choice((1, 1, 2, 3, 4, 6))


def as_ruler(rng: random.Random) -> bool:
    """RULER's own wording is public; a minor share has it."""
    return rng.random() < 0.2


def ruler_form(name: str, key: str, plural: str, verb: str) -> tuple[str, tuple[str, str]]:
    question = f"What are all the {name}s for {key} mentioned in the provided text?"
    if not plural:
        question = f"What is the {name} for {key} mentioned in the provided text?"
    begin = f" The {name}{plural} for {key} mentioned in the provided text {verb}"
    return question, ("\n{question}" + begin.replace("{", "").replace("}", ""), " {answer}\n")


def hidden_keys(
    rng: random.Random,
    name: str,
    form: str,
    pairs: list[tuple[str, str]],
    asked: list[tuple[str, str]],
    ruler: bool,
    others: list[str] | None = None,
) -> Hidden:
    needles = [needle_of(form, ruler, name, key, value) for key, value in pairs] + (others or [])
    rng.shuffle(needles)
    question, answer = rng.choice(QUESTIONS), rng.choice(ANSWERS)
    if ruler:
        key, value = asked[0]
        literal, plain = ruler_form(name, key, "", "is")
        return Hidden(needles, [(literal, value)], introduction_of(rng, name), plain_form=plain)
    questions = [
        (question.format(kind=name, key=key), answer.format(kind=name, key=key, value=value))
        for key, value in asked
    ]
    return Hidden(needles, questions, introduction_of(rng, name))


def introduction_of(rng: random.Random, name: str) -> str:
    return rng.choice(INTRODUCTIONS).format(kind=name)


def needle_of(form: str, ruler: bool, name: str, key: str, value: str) -> str:
    return (RULER_NEEDLE if ruler else form).format(kind=name, key=key, value=value)


def key_values(
    rng: random.Random, kind: str, count: int, make: Callable[[], str] | None = None
) -> list[tuple[str, str]]:
    """`count` keys, all of them different and of one style, with a value each."""
    pairs: dict[str, str] = {}
    style = rng.randrange(7)
    while len(pairs) < count:
        pairs[make() if make else random_key(rng, style)] = random_value(rng, kind)
    return list(pairs.items())


def random_key(rng: random.Random, style: int | None = None) -> str:
    style = rng.randrange(7) if style is None else style
    if style <= 2:
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if style == 3:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    if style == 4:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if style == 5:
        return f"{rng.choice(NOUNS)}-{rng.randint(10, 9999)}"
    return f"the {rng.choice(NOUNS)} {rng.choice(NOUNS)} in {rng.choice(CITIES)}"


def random_value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        digits = rng.choice((4, 5, 6, 7, 7, 7, 8, 9, 10))
        return str(rng.randint(10 ** (digits - 1), 10**digits - 1))
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind == "word":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "phone":
        return f"{rng.randint(100, 999)}-{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    if kind == "password":
        return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(6, 14)))
    if kind == "city":
        return rng.choice(CITIES)
    if kind == "person":
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    return f"{rng.randint(1, 30)} {rng.choice(MONTHS)} {rng.randint(1900, 2030)}"


def random_fact(rng: random.Random, of: tuple[str, str, str]) -> tuple[str, str, str]:
    """One of `FACTS` with its words: sentence, question, answer."""
    words = {
        "name": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        "city": rng.choice(CITIES),
        "city2": rng.choice(CITIES),
        "adjective": rng.choice(ADJECTIVES),
        "noun": rng.choice(NOUNS),
        "noun2": rng.choice(NOUNS),
        "word": rng.choice(NOUNS).capitalize(),
        "year": rng.randint(1700, 2020),
        "count": rng.randint(2, 90),
        "hour": rng.randint(5, 22),
        "minute": rng.randint(10, 59),
    }
    sentence, question, answer = (part.format(**words) for part in of)
    return sentence, question, answer


def variable_names(rng: random.Random, count: int) -> list[str]:
    names: set[str] = set()
    while len(names) < count:
        names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
    return sorted(names, key=lambda _: rng.random())
