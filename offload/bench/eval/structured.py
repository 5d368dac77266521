"""Questions whose answers stand in structured text: JSON, code and tables.

After the pilot study of LycheeCluster (arXiv 2603.08453, section 3.1 and Figure 2), which puts
Quest's scoring over fixed pages beside the same over structure-aware chunks on StrucText-Eval. That
benchmark is a download; these are made here, of the same kind: one unit (an object, a function, a
row) among many that look like it is asked for by its name. The answer is its values, and begins
with what it is called, so that small models can answer, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from offload.bench.eval.fit import largest
from offload.bench.eval.sample import CountTokens, Sample, TooShort
from offload.bench.eval.words import word_list

MAX_NEW_TOKENS = 64
_FIRSTS = 96  # of names, and as many seconds
_MOST_UNITS = _FIRSTS**2
_FIELDS = ("balance", "pin")


@dataclass(frozen=True)
class _Unit:
    """One object, function or row: what it is called, and the values that it has."""

    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class _Form:
    """How units are written, and asked for by {name}."""

    text: Callable[[list[_Unit]], str]
    question: str
    prefix: str


def _json(units: list[_Unit]) -> str:
    objects = [json.dumps({"name": unit.name, **unit.values}) for unit in units]
    return "[" + ",\n ".join(objects) + "]"


def _code(units: list[_Unit]) -> str:
    return "\n\n".join(
        f"def {unit.name}():\n"
        + "".join(f"    {field} = {value!r}\n" for field, value in unit.values.items())
        + f"    return {', '.join(unit.values)}"
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
        'Here is a JSON document.\n\n{text}\n\nRepeat the object whose "name" is "{name}".',
        '{{"name": "{name}",',
    ),
    "code": _Form(
        _code,
        "Here is Python code.\n\n{text}\n\nRepeat the function {name}.",
        "def {name}():",
    ),
    "table": _Form(
        _table,
        "Here is a table.\n\n{text}\n\nRepeat the row whose name is {name}.",
        "| {name} |",
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
    units = _units(rng, min(_MOST_UNITS, max(2, length // 4)))

    def text_of(num_units: int, name: str) -> str:
        return form.question.format(text=form.text(units[:num_units]), name=name)

    longest = max((unit.name for unit in units), key=len)

    def fits(num_units: int) -> bool:
        with_prefix = f"{text_of(num_units, longest)} {form.prefix.format(name=longest)}"
        return count_tokens(with_prefix) + MAX_NEW_TOKENS <= length

    num_units = largest(len(units), fits)
    if num_units < 2:
        raise TooShort(task, length)
    unit = units[rng.randrange(num_units)]
    prefix, outputs = form.prefix.format(name=unit.name), tuple(unit.values.values())
    text = text_of(num_units, unit.name)
    return Sample(task, length, index, text, prefix, outputs, MAX_NEW_TOKENS)


def _units(rng: random.Random, count: int) -> list[_Unit]:
    """Units of different names; every value is one of its own."""
    nouns = [noun for noun in word_list("nouns") if noun.isalpha() and noun.islower()]
    firsts, seconds = rng.sample(nouns, _FIRSTS), rng.sample(nouns, _FIRSTS)
    pairs = rng.sample(range(_MOST_UNITS), count)
    numbers = [str(n) for n in rng.sample(range(100_000, 1_000_000), len(_FIELDS) * count)]
    return [
        _Unit(
            f"{firsts[pair // _FIRSTS]}_{seconds[pair % _FIRSTS]}",
            dict(zip(_FIELDS, numbers[len(_FIELDS) * i :], strict=False)),
        )
        for i, pair in enumerate(pairs)
    ]
