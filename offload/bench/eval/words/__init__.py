"""The words of RULER's keys and lists: those of the package wonderwords 3.0.1 (MIT, see LICENSE).

They are here because RULER's samples depend on every word, and for machines without a network.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


def word_list(name: str) -> list[str]:
    """`nouns`, `adjectives` or `verbs`."""
    return files(__name__).joinpath(f"{name}.txt").read_text("utf-8").split("\n")[:-1]


@cache
def needle_words() -> list[str]:
    """Keys of needles, such as `abrasive-abacus`."""
    return sorted(
        {f"{adj}-{noun}" for adj in word_list("adjectives") for noun in word_list("nouns")}
    )


def all_words() -> list[str]:
    """Of all kinds, sorted."""
    return sorted({word for kind in ("nouns", "adjectives", "verbs") for word in word_list(kind)})
