"""One needle in prose at each depth and length."""

from __future__ import annotations

import random
from collections.abc import Sequence

from offload.bench.eval.fit import largest
from offload.bench.eval.ruler.niah import MAX_NEW_TOKENS, NEEDLE, TEMPLATE, sentences_of
from offload.bench.eval.sample import CountPrompt, Sample, TooShort
from offload.bench.eval.words import needle_words

_QUESTION = TEMPLATE.replace("Some", "A").replace("are all", "is").replace("are", "is")


def depth_samples(
    depth: int,
    length: int,
    num_samples: int,
    *,
    seed: int,
    count_prompt: CountPrompt,
    prose: Sequence[str],
) -> list[Sample]:
    """Prompts of RULER's wording whose needle stands `depth` per cent into the text.

    Prompt and answer fit in `length` tokens, with the chat template's, so that nothing is cut.

    The text of each begins elsewhere in `prose`; that and the needle are the same at every depth.

    Raises:
        ValueError: `length` leaves no room for a sentence, or `prose` is too short.
    """
    return [_sample(depth, length, i, seed, count_prompt, prose) for i in range(num_samples)]


def _sample(
    depth: int, length: int, index: int, seed: int, count_prompt: CountPrompt, prose: Sequence[str]
) -> Sample:
    rng = random.Random(f"{seed} {length} {index}")
    key, value = rng.choice(needle_words()), str(rng.randint(10**6, 10**7 - 1))
    needle = NEEDLE.format(type_needle_v="numbers", key=key, value=value)
    words = prose[rng.randrange(max(1, len(prose) // 2)) :]

    prefix = f"The special magic number for {key} mentioned in the provided text is"

    def sample_of(num_words: int) -> Sample:
        sentences = sentences_of(" ".join(words[:num_words]))
        place = round(len(sentences) * depth / 100)
        context = " ".join([*sentences[:place], needle, *sentences[place:]])
        text = _QUESTION.format(type_needle_v="number", context=context, query=key)
        return Sample(f"depth {depth} %", length, index, text, prefix, (value,), MAX_NEW_TOKENS)

    room = length - MAX_NEW_TOKENS
    num_words = largest(len(words), lambda n: count_prompt(sample_of(n)) <= room)
    if num_words < 1:
        raise TooShort("needle", length)
    if num_words == len(words):
        raise ValueError(
            f"the haystack's {len(prose):,} words are too few for {length:,} tokens; give more "
            "text by --haystack, or lower --context"
        )
    return sample_of(num_words)
