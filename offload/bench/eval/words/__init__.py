"""The words of RULER's keys and lists: those of the package wonderwords 3.0.1 (MIT, see LICENSE).

They are here because RULER's samples depend on every word, and for machines without a network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate


def word_list(name: str) -> list[str]:
    """`nouns`, `adjectives` or `verbs`."""
    return files(__name__).joinpath(f"{name}.txt").read_text("utf-8").split("\n")[:-1]


def all_words() -> list[str]:
    """Words of all kinds, sorted."""
    return sorted({word for kind in ("nouns", "adjectives", "verbs") for word in word_list(kind)})


class NeedleWords:
    """Keys of needles, such as `abrasive-abacus`: every adjective with every noun, sorted.

    They are 6 million, so that they are made when they are asked for. All keys of one adjective
    follow each other, unless an adjective begins with another one and a hyphen: those are a group,
    whose keys are kept.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted({*nouns})
        groups: list[list[str]] = []
        for start in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and start.startswith(groups[-1][0]):
                groups[-1].append(start)
            else:
                groups.append([start])
        self._starts = [starts[0] for starts in groups]
        self._mixed = {
            starts[0]: sorted({start + noun for start in starts for noun in self._nouns})
            for starts in groups
            if len(starts) > 1
        }
        sizes = [len(self._mixed.get(start, self._nouns)) for start in self._starts]
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        group = bisect_right(self._ends, index)
        start, within = self._starts[group], index - (self._ends[group - 1] if group else 0)
        if start in self._mixed:
            return self._mixed[start][within]
        return start + self._nouns[within]


@cache
def needle_words() -> NeedleWords:
    """Those of all adjectives and nouns."""
    return NeedleWords(word_list("adjectives"), word_list("nouns"))
