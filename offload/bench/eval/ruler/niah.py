"""RULER's needles in a haystack: NIAH single 1-3, multikey 1-3, multivalue, multiquery.

Ported from NVIDIA's RULER (Apache-2.0, Copyright 2024 NVIDIA CORPORATION) by way of lm-eval 0.4.13,
whose samples these are, draw for draw, with three exceptions. The haystack of prose is text that
the caller has, not a download of essays; its sentences are split by a rule, not by NLTK's data; and
where not one step of it fits, it grows by fewer words.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from offload.bench.eval.fit import first_fitting, grown
from offload.bench.eval.sample import CountTokens, Sample, TooShort
from offload.bench.eval.words import needle_words

TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MAX_NEW_TOKENS = 128
_DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent
_FEW_WORDS = 10  # that prose grows by where RULER's step does not fit
_LONG_SENTENCE = 100  # words; text with longer ones on the mean has no ends to go by
_ORDER_SEED = 42  # of the needles of one prompt, always
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[A-Z0-9])")


@dataclass(frozen=True)
class Needles:
    """A task: what is hidden in what.

    Attributes:
        haystack: `repeat` (one noise sentence), `prose`, or `needle` (other needles).
        keys, values: `words`, `numbers` or `uuids`.
        num_keys, num_values, num_queries: that are hidden, of each key, and asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


TASKS = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("prose"),
    "niah_single_3": Needles("prose", values="uuids"),
    "niah_multikey_1": Needles("prose", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("prose", num_values=4),
    "niah_multiquery": Needles("prose", num_keys=4, num_queries=4),
}


def needle_samples(
    task: str,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_tokens: CountTokens,
    prose: Sequence[str],
) -> list[Sample]:
    """Samples of one of `TASKS`.

    Args:
        prose: words of the haystack of prose.

    Raises:
        TooShort: `length` has no room for the needles.
        ValueError: prose that is shorter than `length`.
    """
    kind, rng = TASKS[task], random.Random(seed)
    step = 500 if kind.haystack == "prose" else 25 if length >= 4096 else 5
    num_needles = kind.num_keys * kind.num_values
    room = length - MAX_NEW_TOKENS

    def tokens_of(size: int) -> int:
        text, answers, _ = _draw(kind, size, rng, prose)
        tokens = count_tokens(text + " ".join(answers))
        if tokens <= room and kind.haystack == "prose" and size > len(prose):
            raise ValueError(
                f"{task}: the haystack's {len(prose):,} words are {tokens:,} tokens, too few for "
                f"{length:,}; give more text by --haystack, or lower --context"
            )
        return tokens

    size = grown(max(step, num_needles), step, room, tokens_of)
    if kind.haystack == "prose" and size < step:  # RULER would hide the needles in nothing
        step = _FEW_WORDS
        size = grown(step, step, room, tokens_of)
    size = max(size, num_needles)
    least = 1 if kind.haystack == "prose" else num_needles
    samples = []
    for index in range(num_samples):
        fitting = first_fitting(
            lambda n: _draw(kind, n, rng, prose),
            size,
            step,
            least,
            lambda drawn: count_tokens(drawn[0]) <= room,
        )
        if fitting is None:
            raise TooShort(task, length)
        text, answers, query = fitting
        single = kind.num_queries * kind.num_values == 1
        of_kind, verb = (kind.values[:-1], "is") if single else (kind.values, "are")
        prefix = f"The special magic {of_kind} for {query} mentioned in the provided text {verb}"
        samples.append(Sample(task, length, index, text, prefix, tuple(answers), MAX_NEW_TOKENS))
    return samples


def _draw(
    kind: Needles, size: int, rng: random.Random, prose: Sequence[str]
) -> tuple[str, list[str], str]:
    """(text, answers, query) with a haystack of `size` words of prose, or lines."""
    keys, values, needles = [], [], []
    for _ in range(kind.num_keys):
        keys.append(_value(kind.keys, rng))
        values.append([_value(kind.values, rng) for _ in range(kind.num_values)])
        needles += [
            NEEDLE.format(type_needle_v=kind.values, key=keys[-1], value=value)
            for value in values[-1]
        ]
    random.Random(_ORDER_SEED).shuffle(needles)
    if kind.haystack == "prose":
        context = among_sentences(needles, sentences_of(" ".join(prose[:size])), rng)
    else:
        lines = [NOISE] * size
        if kind.haystack == "needle":
            lines = [_other_needle(kind, rng) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        context = "\n".join(lines)

    asked = rng.sample(range(kind.num_keys), kind.num_queries)
    queries = [keys[i] for i in asked]
    query = queries[0]
    if len(queries) > 1:
        query = ", ".join(queries[:-1]) + ", and " + queries[-1]
    template, type_needle_v = TEMPLATE, kind.values
    if kind.num_queries * kind.num_values == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        type_needle_v = type_needle_v[:-1]
    text = template.format(type_needle_v=type_needle_v, context=context, query=query)
    return text, [value for i in asked for value in values[i]], query


def among_sentences(needles: list[str], sentences: Sequence[str], rng: random.Random) -> str:
    """Prose with needles at depths that are drawn: different ones, while there are as many."""
    num_needles = len(needles)
    depths = rng.sample(_DEPTHS * -(-num_needles // len(_DEPTHS)), num_needles)
    cuts = [0, *sorted(int(len(sentences) * (d / 100)) for d in depths), len(sentences)]
    parts = []
    for i in range(1, len(cuts)):
        parts.append(" ".join(sentences[cuts[i - 1] : cuts[i]]))
        parts += needles[i - 1 : i]
    return " ".join(parts)


@lru_cache(maxsize=64)  # sizes of one haystack: each is split once for all samples
def sentences_of(text: str) -> list[str]:
    """Split where a mark ends a sentence and another begins; or between words, where nearly no
    sentence ends, for needles to stand at their depths there, too."""
    sentences, words = _SENTENCE_END.split(text.strip()), text.split()
    return words if len(sentences) * _LONG_SENTENCE < len(words) else sentences


def _other_needle(kind: Needles, rng: random.Random) -> str:
    key = _value(kind.keys, rng)
    return NEEDLE.format(type_needle_v=kind.values, key=key, value=_value(kind.values, rng))


def _value(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return rng.choice(needle_words())
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
