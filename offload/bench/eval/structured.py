"""Questions whose answers stand in structured text: JSON, code and tables.

After the pilot study of LycheeCluster (arXiv 2603.08453, section 3.1 and Figure 2), which puts
Quest's scoring over fixed pages beside the same over structure-aware chunks on StrucText-Eval. That
benchmark is a download; these are made here, of the same kind: the answer is one value of one unit
(a record, a function, a row) among many that look like it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from offload.bench.eval.fit import largest
from offload.bench.eval.sample import CountTokens, Sample, TooShort
from offload.bench.eval.words import word_list

MAX_NEW_TOKENS = 24
_FIELDS = ("city", "port", "balance", "locker", "pin")


@dataclass(frozen=True)
class _Unit:
    """One record, function or row: what it is called, and the values that it has."""

    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class _Form:
    """How units are written, and asked for: {name}, {field}."""

    text: Callable[[list[_Unit]], str]
    question: str
    prefix: str


def _json(units: list[_Unit]) -> str:
    return json.dumps([{"name": unit.name, **unit.values} for unit in units], indent=1)


def _class_name(unit: _Unit) -> str:
    return unit.name.title().replace("_", "")


def _code(units: list[_Unit]) -> str:
    return "\n\n".join(
        f"class {_class_name(unit)}:\n"
        f'    """Settings of {unit.name}."""\n\n'
        + "\n".join(
            f"    def {field}(self):\n        return {value!r}"
            for field, value in unit.values.items()
        )
        for unit in units
    )


def _table(units: list[_Unit]) -> str:
    header = ["name", *_FIELDS]
    rows = [header, ["---"] * len(header)]
    rows += [[unit.name, *unit.values.values()] for unit in units]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


_FORMS = {
    "json": _Form(
        _json,
        'Here is a JSON document.\n\n{text}\n\nWhat is the "{field}" of the object whose "name" is '
        '"{name}"?',
        'The "{field}" of "{name}" is',
    ),
    "code": _Form(
        _code,
        "Here is Python code.\n\n{text}\n\nWhat does the method {field} of the class {name} "
        "return?",
        "The method {field} of the class {name} returns",
    ),
    "table": _Form(
        _table,
        "Here is a table.\n\n{text}\n\nWhat stands in the column {field} of the row whose name is "
        "{name}?",
        "In the row of {name}, the column {field} is",
    ),
}
STRUCTURED_TASKS = tuple(_FORMS)


def structured_samples(
    task: str, length: int, num_samples: int, *, seed: int, count_tokens: CountTokens
) -> list[Sample]:
    """Samples of one of `STRUCTURED_TASKS`; the unit that is asked for stands anywhere.

    Raises:
        TooShort: `length` leaves no room for two units.
    """
    return [_sample(task, length, index, seed, count_tokens) for index in range(num_samples)]


def _sample(task: str, length: int, index: int, seed: int, count_tokens: CountTokens) -> Sample:
    form, rng = _FORMS[task], random.Random(f"{seed} {task} {length} {index}")
    units = _units(rng, max(2, length // 16))
    longest = {"field": max(_FIELDS, key=len), "name": max((u.name for u in units), key=len)}

    def text_of(num_units: int, **asked: str) -> str:
        return form.question.format(text=form.text(units[:num_units]), **asked)

    def fits(num_units: int) -> bool:
        with_answer = f"{text_of(num_units, **longest)} {form.prefix.format(**longest)}"
        return count_tokens(with_answer) + MAX_NEW_TOKENS <= length

    num_units = largest(len(units), fits)
    if num_units < 2:
        raise TooShort(task, length)
    unit, field = units[rng.randrange(num_units)], rng.choice(_FIELDS)
    asked = {"field": field, "name": _class_name(unit) if task == "code" else unit.name}
    return Sample(
        task,
        length,
        index,
        text_of(num_units, **asked),
        form.prefix.format(**asked),
        (unit.values[field],),
        MAX_NEW_TOKENS,
    )


def _units(rng: random.Random, count: int) -> list[_Unit]:
    """Units of different names; every value is one of its own."""
    nouns = [noun for noun in word_list("nouns") if noun.isalpha() and noun.islower()]
    firsts, seconds = rng.sample(nouns, 64), rng.sample(nouns, 64)
    pairs = rng.sample(range(64 * 64), count)
    cities = [f"{noun.title()}{end}" for noun in nouns for end in ("ton", "ville", "field")]
    places = rng.sample(cities, count)
    numbers = [str(n) for n in rng.sample(range(10_000, 1_000_000), 4 * count)]
    return [
        _Unit(
            f"{firsts[pair // 64]}_{seconds[pair % 64]}",
            dict(zip(_FIELDS, [places[i], *numbers[4 * i : 4 * i + 4]], strict=True)),
        )
        for i, pair in enumerate(pairs)
    ]
