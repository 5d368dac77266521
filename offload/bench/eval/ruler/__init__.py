"""RULER: the 11 synthetic tasks that need no download, with the published templates and scores.

Source: Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?
(COLM 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.bench.eval.ruler.counting import common_word_samples, frequent_word_samples
from offload.bench.eval.ruler.niah import TASKS as _NIAH
from offload.bench.eval.ruler.niah import needle_samples
from offload.bench.eval.ruler.tracking import tracking_samples
from offload.bench.eval.sample import CountTokens, Sample

_OTHERS = {
    "vt": tracking_samples,
    "cwe": common_word_samples,
    "fwe": frequent_word_samples,
}
RULER_TASKS = (*_NIAH, *_OTHERS)
PROSE_TASKS = tuple(name for name, kind in _NIAH.items() if kind.haystack == "prose")


def ruler_samples(
    task: str,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_tokens: CountTokens,
    prose: Sequence[str],
) -> list[Sample]:
    """The first samples of one of `RULER_TASKS` at one length, whatever else is asked for.

    Args:
        prose: words of the haystack of prose.

    Raises:
        ValueError: `length` leaves no room for the prompt, or `prose` is too short.
    """
    if task in _NIAH:
        return needle_samples(
            task, length, num_samples, seed=seed, count_tokens=count_tokens, prose=prose
        )
    return _OTHERS[task](task, length, num_samples, seed=seed, count_tokens=count_tokens)
