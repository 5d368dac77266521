"""RULER: the 11 synthetic tasks that need no download, with the published templates and scores;
and harder ones in its wording.

Source: Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?
(COLM 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from offload.bench.eval.ruler.asked import TASKS as _ASKED
from offload.bench.eval.ruler.asked import asked_samples
from offload.bench.eval.ruler.counting import common_word_samples, frequent_word_samples
from offload.bench.eval.ruler.niah import TASKS as _NIAH
from offload.bench.eval.ruler.niah import needle_samples
from offload.bench.eval.ruler.tracking import tracking_samples
from offload.bench.eval.sample import CountTokens, Sample

_OTHERS: dict[str, Callable[..., list[Sample]]] = {
    "vt": tracking_samples,
    "cwe": common_word_samples,
    "fwe": frequent_word_samples,
}
RULER_TASKS = (*_NIAH, *_OTHERS)
_VARIANTS: dict[str, Callable[..., list[Sample]]] = {
    "vt_1": partial(tracking_samples, num_hops=1),
    "vt_2": partial(tracking_samples, num_hops=2),
    "cwe_3": partial(common_word_samples, num_common=3, repeats=90),
}
ALL_TASKS = (*RULER_TASKS, *_VARIANTS, *_ASKED)
HARD_TASKS = (
    "niah_multikey_2",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "vt_2",
    "cwe_3",
    "fwe",
    "asked",
    "asked_lines",
    "two_steps",
)
PROSE_TASKS = tuple(name for name, kind in (_NIAH | _ASKED).items() if kind.haystack == "prose")


def ruler_samples(
    task: str,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_tokens: CountTokens,
    prose: Sequence[str],
) -> list[Sample]:
    """The first samples of one of `ALL_TASKS` at one length, whatever else is asked for.

    Args:
        prose: words of the haystack of prose.

    Raises:
        ValueError: `length` leaves no room for the prompt, or `prose` is too short.
    """
    if task in _NIAH:
        return needle_samples(
            task, length, num_samples, seed=seed, count_tokens=count_tokens, prose=prose
        )
    if task in _ASKED:
        return asked_samples(
            task, length, num_samples, seed=seed, count_tokens=count_tokens, prose=prose
        )
    return (_OTHERS | _VARIANTS)[task](
        task, length, num_samples, seed=seed, count_tokens=count_tokens
    )
