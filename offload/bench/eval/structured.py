"""Questions whose answers stand in structured text: JSON, code and tables.

After the pilot study of LycheeCluster (arXiv 2603.08453, section 3.1 and Figure 2), which puts
Quest's scoring over fixed pages against the same over structure-aware chunks on StrucText-Eval.
That benchmark is a download; these are made here, of the same kind: one unit (an object, a
function, a row) among many that look like it is asked for by its name. The answer is its values,
and begins with all that stands before the first of them, so that a small model has only to find
and copy it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from offload.bench.eval.fit import largest
from offload.bench.eval.sample import CountPrompt, Sample, TooShort
from offload.bench.eval.words import word_list

FIELDS = ("balance", "pin", "port", "level", "size", "year", "count", "weight")
_TOKENS_OF_FIELD = 24  # of an answer: six digits, and what stands around them
_FIRSTS = 96  # of names, and as many seconds
_MOST_UNITS = _FIRSTS**2


@dataclass(frozen=True)
class _Unit:
    """One object, function or row: what it is called, and its values by field."""

    name: str
    values: dict[str, int]


@dataclass(frozen=True)
class _Form:
    """How units are written, and asked for by {name}; {field} is the first one's."""

    text: Callable[[list[_Unit]], str]
    question: str
    prefix: str


def _json(units: list[_Unit]) -> str:
    objects = [json.dumps({"name": unit.name, **unit.values}) for unit in units]
    return "[\n  " + ",\n  ".join(objects) + "\n]"


def _code(units: list[_Unit]) -> str:
    return "\n\n".join(
        f"def {unit.name}():\n"
        + "".join(f"    {field} = {value}\n" for field, value in unit.values.items())
        + f"    return {', '.join(unit.values)}"
        for unit in units
    )


def _table(units: list[_Unit]) -> str:
    header = ["name", *units[0].values]
    rows = [header, ["---"] * len(header)]
    rows += [[unit.name, *map(str, unit.values.values())] for unit in units]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


_FORMS = {
    "json": _Form(
        _json,
        'Here is a JSON document.\n\n{text}\n\nRepeat the object whose "name" is "{name}".',
        '{{"name": "{name}", "{field}":',
    ),
    "code": _Form(
        _code,
        "Here is Python code.\n\n{text}\n\nRepeat the function {name}.",
        "def {name}():\n    {field} =",
    ),
    "table": _Form(
        _table,
        "Here is a table.\n\n{text}\n\nRepeat the row whose name is {name}.",
        "| {name} |",
    ),
}
STRUCTURED_TASKS = tuple(_FORMS)


def structured_samples(
    task: str,
    length: int,
    num_samples: int,
    *,
    num_fields: int = 1,
    seed: int,
    count_prompt: CountPrompt,
) -> list[Sample]:
    """Samples of one of `STRUCTURED_TASKS`; the unit that is asked for stands anywhere.

    Prompt and answer fit in `length` tokens, with the chat template's, so that nothing is cut.

    Args:
        num_fields: values of a unit, all of which are asked for: the first so many of `FIELDS`.

    Raises:
        TooShort: `length` leaves no room for two units.
    """
    fields = FIELDS[:num_fields]
    return [
        _sample(task, length, index, fields, seed, count_prompt) for index in range(num_samples)
    ]


def _sample(
    task: str,
    length: int,
    index: int,
    fields: tuple[str, ...],
    seed: int,
    count_prompt: CountPrompt,
) -> Sample:
    form, rng = _FORMS[task], random.Random(f"{seed} {task} {length} {index}")
    units = _units(rng, min(_MOST_UNITS, max(2, length // 4)), fields)
    max_new_tokens = _TOKENS_OF_FIELD * len(fields)

    place = rng.random()

    def sample_of(num_units: int) -> Sample:
        unit = units[int(place * num_units)]
        text = form.question.format(text=form.text(units[:num_units]), name=unit.name)
        prefix = form.prefix.format(name=unit.name, field=fields[0])
        outputs = tuple(map(str, unit.values.values()))
        return Sample(task, length, index, text, prefix, outputs, max_new_tokens)

    room = length - max_new_tokens
    num_units = largest(len(units), lambda n: count_prompt(sample_of(n)) <= room)
    if num_units < 2:
        raise TooShort(task, length)
    return sample_of(num_units)


def _units(rng: random.Random, count: int, fields: tuple[str, ...]) -> list[_Unit]:
    """Units of different names; every value is one of its own."""
    nouns = [noun for noun in word_list("nouns") if noun.isalpha() and noun.islower()]
    firsts, seconds = rng.sample(nouns, _FIRSTS), rng.sample(nouns, _FIRSTS)
    pairs = rng.sample(range(_MOST_UNITS), count)
    numbers = rng.sample(range(100_000, 1_000_000), len(fields) * count)
    return [
        _Unit(
            f"{firsts[pair // _FIRSTS]}_{seconds[pair % _FIRSTS]}",
            dict(zip(fields, numbers[len(fields) * i :], strict=False)),
        )
        for i, pair in enumerate(pairs)
    ]
