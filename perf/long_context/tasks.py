"""Generated documents with questions, in the manner of RULER, and the kinds of a training step.

A sample is token ids and a weight for each: what the loss of predicting that token counts.
"""

from __future__ import annotations

import random
import string
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from perf.long_context.needles import (
    Hidden,
    as_ruler,
    hidden_keys,
    introduction_of,
    key_values,
    needle_of,
    num_rounds,
    random_fact,
    random_key,
    random_value,
    ruler_form,
    variable_names,
)
from perf.long_context.sample import Sample
from perf.long_context.text import Corpus
from perf.long_context.words import (
    ADJECTIVES,
    CITIES,
    COUNTRIES,
    FACTS,
    FIRST_NAMES,
    INSTRUCTIONS,
    INTRODUCTIONS,
    NEEDLES,
    NOISE,
    NOUNS,
    PLAIN_FORMS,
    TOPICS,
    VALUE_NAMES,
)

# Shares of the tasks in a training step.
TASKS = {
    "single": 20,
    "single_noise": 6,
    "multi_key": 18,
    "keys_only": 14,
    "multi_value": 7,
    "multi_query": 8,
    "facts": 9,
    "quote": 10,
    "tracing": 4,
    "common_words": 2,
    "frequent_words": 2,
}
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_END_WEIGHT = 0.3  # of the token that ends an answer
_MANUAL_SHARE = 0.25  # of haystacks


class TaskMaker:
    """Makes samples of any kind and length, all chosen by the `random.Random` it is given."""

    def __init__(self, tokenizer_folder: Path, corpus: Corpus) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        self._corpus = corpus
        end = self._tokenizer.token_to_id("<|im_end|>")
        if end is None:
            raise ValueError(f"the tokenizer in {tokenizer_folder} has no token '<|im_end|>'")
        self.end = end
        self._special = frozenset(
            token for token, of in self._tokenizer.get_added_tokens_decoder().items() if of.special
        )
        words = [self._tokenizer.decode([i]) for i in range(self._tokenizer.get_vocab_size())]
        self._ends = np.array([w.rstrip(" ").endswith((".", "!", "?", "\n", '."')) for w in words])
        self._newline = np.array([w.endswith("\n") for w in words])
        self._begins = np.array([w[:1] in (" ", "\n") or w[:1].isupper() for w in words])
        lengths = np.diff(corpus.starts)
        self._documents = {
            prose: (np.flatnonzero(corpus.prose == prose), lengths[corpus.prose == prose])
            for prose in (True, False)
        }

    def task(self, rng: random.Random, kind: str, length: int) -> Sample:
        """A document of at most `length` tokens, and hardly fewer, with its questions."""
        if kind in ("tracing", "common_words", "frequent_words"):
            made: Sample = getattr(self, f"_{kind}")(rng, length)
            return made
        if kind == "quote":
            return self._quote(rng, length)
        task: Hidden = getattr(self, f"_{kind}")(rng, length)
        return self._document(rng, kind, length, task)

    def text(self, rng: random.Random, length: int, prose_share: float = 0.75) -> Sample:
        """A span of a document: every token counts."""
        sample = Sample("text")
        tokens = self.span(rng, length, rng.random() < prose_share)
        sample.add(tokens, 1.0)
        return sample

    def chat(self, rng: random.Random) -> list[int]:
        """A short instruction as the chat template has it, up to where the answer begins."""
        instruction = rng.choice(INSTRUCTIONS).format(
            topic=rng.choice(TOPICS).replace("-", " "),
            noun=rng.choice(NOUNS),
            adjective=rng.choice(ADJECTIVES),
            name=rng.choice(FIRST_NAMES),
            city=rng.choice(CITIES),
            country=rng.choice(COUNTRIES),
            count=rng.randint(2, 40),
            count2=rng.randint(2, 40),
        )
        return self.encode(_chat_start() + instruction + _CHAT_TURN)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def span(self, rng: random.Random, length: int, prose: bool) -> list[int]:
        """`length` tokens that follow one another, from one document if one is that long."""
        documents, lengths = self._documents[prose]
        if not len(documents):
            documents, lengths = self._documents[not prose]
        weights = np.maximum(lengths - length, 0) + lengths * 0.02
        tokens: list[int] = []
        while len(tokens) < length:
            place = rng.choices(range(len(documents)), weights.tolist())[0]
            start, size = int(self._corpus.starts[documents[place]]), int(lengths[place])
            first = start + rng.randrange(max(1, size - (length - len(tokens))))
            first = self._boundary(first, start + size)
            last = min(start + size, first + length - len(tokens))
            tokens += self._corpus.tokens[first:last].tolist()
        return tokens

    def _boundary(self, place: int, stop: int) -> int:
        """The next sentence's first token at `place` or after it."""
        near = self._corpus.tokens[place : min(stop, place + 400)]
        found = self.boundaries(near)
        return place + int(found[0]) if len(found) else place

    def boundaries(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._ends[tokens[:-1]] & self._begins[tokens[1:]]) + 1

    # ---- what is hidden -----------------------------------------------------------------------

    def _single(self, rng: random.Random, length: int) -> Hidden:
        kind = rng.choices(list(VALUE_NAMES), [8, 3, 3, 2, 3, 2, 2, 1])[0]
        name, form, ruler = rng.choice(VALUE_NAMES[kind]), rng.choice(NEEDLES), as_ruler(rng)
        pairs = [(random_key(rng), random_value(rng, kind))]
        others = [self._distractor(rng) for _ in range(rng.choice((0, 0, 0, 1, 2, 4)))]
        return hidden_keys(rng, name, form, pairs, pairs, ruler, others)

    def _single_noise(self, rng: random.Random, length: int) -> Hidden:
        task = self._single(rng, length)
        return Hidden(
            task.needles, task.questions, task.introduction, rng.choice(NOISE), task.plain_form
        )

    def _multi_key(self, rng: random.Random, length: int) -> Hidden:
        kind = rng.choices(list(VALUE_NAMES), [8, 3, 3, 2, 2, 2, 2, 1])[0]
        name, form, ruler = rng.choice(VALUE_NAMES[kind]), rng.choice(NEEDLES), as_ruler(rng)
        pairs = key_values(rng, kind, rng.choice((2, 3, 4, 4, 4, 6, 8, 12, 16)))
        asked = rng.sample(pairs, min(len(pairs), num_rounds(rng)))
        return hidden_keys(rng, name, form, pairs, asked, ruler)

    def _keys_only(self, rng: random.Random, length: int) -> Hidden:
        kind = rng.choices(("number", "uuid", "word", "password"), (6, 4, 2, 1))[0]
        name, form, ruler = rng.choice(VALUE_NAMES[kind]), rng.choice(NEEDLES), as_ruler(rng)
        of_uuids = kind == "uuid" and rng.random() < 0.6
        make = partial(random_value, rng, "uuid") if of_uuids else partial(random_key, rng)
        pattern = needle_of(form, ruler, name, make(), random_value(rng, kind))
        size = len(self.encode(" " + pattern))
        # Some with a few hundred keys in prose, most filled by keys.
        count = max(2, int((length - 300) * rng.choice((0.3, 0.6, 0.9, 0.93)) / (size + 1.5)))
        pairs = key_values(rng, kind, count, make)
        asked = rng.sample(pairs, min(len(pairs), num_rounds(rng)))
        return hidden_keys(rng, name, form, pairs, asked, ruler)

    def _multi_value(self, rng: random.Random, length: int) -> Hidden:
        kind = rng.choices(("number", "word", "city", "person", "uuid"), (6, 2, 1, 1, 1))[0]
        name, form, ruler = rng.choice(VALUE_NAMES[kind]), rng.choice(NEEDLES), as_ruler(rng)
        key = random_key(rng)
        values = [value for _, value in key_values(rng, kind, rng.randint(2, 5))]
        needles = [needle_of(form, ruler, name, key, value) for value in values]
        if rng.random() < 0.5:
            needles.insert(rng.randrange(len(needles)), self._distractor(rng))
        question = rng.choice(
            (
                f"What are all the {name}s for {key}?",
                f"List every {name} of {key}.",
                f"Which {name}s does {key} have? Name all {len(values)}.",
                f"What are all the {name}s for {key} mentioned in the provided text?",
            )
        )
        answer = rng.choice(
            (
                ", ".join(values) + ".",
                ", ".join(values[:-1]) + ", and " + values[-1] + ".",
                f"The {name}s for {key} are {', '.join(values)}.",
                "\n".join(values),
            )
        )
        form_ = ruler_form(name, key, "s", "are") if ruler else None
        if form_:
            question, answer = form_[0], ", ".join(values)
        return Hidden(needles, [(question, answer)], introduction_of(rng, name),
                     plain_form=form_[1] if form_ else None)  # fmt: skip

    def _multi_query(self, rng: random.Random, length: int) -> Hidden:
        kind = rng.choices(("number", "word", "city", "uuid"), (6, 2, 1, 1))[0]
        name, form, ruler = rng.choice(VALUE_NAMES[kind]), rng.choice(NEEDLES), as_ruler(rng)
        pairs = key_values(rng, kind, rng.choice((2, 3, 4, 4, 6, 8)))
        asked = rng.sample(pairs, min(len(pairs), rng.randint(2, 4)))
        keys = ", ".join(key for key, _ in asked[:-1]) + f", and {asked[-1][0]}"
        question = rng.choice(
            (
                f"What are the {name}s for {keys}?",
                f"Tell me the {name} of each of these: {keys}.",
                f"What are all the {name}s for {keys} mentioned in the provided text?",
            )
        )
        answer = rng.choice(
            (
                "; ".join(f"{key}: {value}" for key, value in asked) + ".",
                "\n".join(f"{key}: {value}" for key, value in asked),
                ", ".join(value for _, value in asked) + ".",
                " ".join(f"The {name} for {key} is {value}." for key, value in asked),
            )
        )
        needles = [needle_of(form, ruler, name, key, value) for key, value in pairs]
        plain = None
        if ruler:
            question, plain = ruler_form(name, keys, "s", "are")
            answer = ", ".join(value for _, value in asked)
        return Hidden(needles, [(question, answer)], introduction_of(rng, name), plain_form=plain)

    def _facts(self, rng: random.Random, length: int) -> Hidden:
        facts = [random_fact(rng, of) for of in rng.sample(FACTS, rng.choice((1, 1, 2, 3, 5)))]
        asked = rng.sample(facts, min(len(facts), num_rounds(rng)))
        needles = [sentence for sentence, _, _ in facts]
        questions = [(question, answer) for _, question, answer in asked]
        return Hidden(needles, questions, rng.choice(INTRODUCTIONS[:7]))

    def _distractor(self, rng: random.Random) -> str:
        kind = rng.choice(list(VALUE_NAMES))
        return rng.choice(NEEDLES).format(
            kind=rng.choice(VALUE_NAMES[kind]), key=random_key(rng), value=random_value(rng, kind)
        )

    # ---- documents of words --------------------------------------------------------------------

    def _quote(self, rng: random.Random, length: int) -> Sample:
        """What follows a passage of the document: the densest long-range signal that text has."""
        rounds = rng.randint(1, 4)
        body = self.span(rng, max(160, length - 160 - rounds * 130), rng.random() < 0.8)
        places = self.boundaries(np.array(body))
        places = places[places < len(body) - 100]
        sample = Sample("quote")
        chat = rng.random() < 0.5
        sample.add(self.encode((_chat_start() if chat else "") + rng.choice(INTRODUCTIONS[:8])))
        sample.add(body)
        for number in range(rounds):
            place = int(rng.choice(places)) if len(places) else rng.randrange(len(body) - 100)
            cut, count = rng.randint(12, 24), rng.randint(16, 48)
            begins = self.decode(body[place : place + cut]).strip()
            question = rng.choice(
                (
                    'The text contains these words: "{}". What follows them?',
                    "Continue the passage of the text that begins with: {}",
                    'Quote what the text says right after "{}"',
                )
            ).format(begins)
            asked = f"\n\n{question}" if number == 0 or not chat else question
            sample.add(self.encode(asked + (_CHAT_TURN if chat else "\nAnswer:")))
            sample.add(body[place + cut : place + cut + count], 1.0)
            sample.add([self.end, *self.encode("\n" + (_CHAT_USER if chat else ""))])
        return sample.cut(length)

    def _tracing(self, rng: random.Random, length: int) -> Sample:
        """Chains of assignments, `VAR A = VAR B`: which variables have a value?"""
        hops, chains = rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2))
        names = variable_names(rng, (hops + 1) * chains)
        value = str(rng.randint(10000, 99999))
        statements: list[list[str]] = []
        for chain in range(chains):
            own = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
            first = value if chain == 0 else str(rng.randint(10000, 99999))
            lines = [f"VAR {own[0]} = {first}"]
            lines += [f"VAR {b} = VAR {a}" for a, b in pairwise(own)]
            statements.append(lines)
        needles: list[str] = []  # each chain in its order, the chains shuffled into each other
        while any(statements):
            needles.append(rng.choice([lines for lines in statements if lines]).pop(0))
        answer = " ".join(names[: hops + 1])
        literal = rng.random() < 0.4
        question = (
            f"Question: Find all variables that are assigned the value {value} in the text above."
            if literal
            else rng.choice(
                (
                    f"Which variables have the value {value}?",
                    f"List the variables that end up equal to {value}.",
                )
            )
        )
        plain = (
            "\n{question} Answer: According to the chain(s) of variable assignment in the text "
            f"above, {hops + 1} variables are assigned the value {value}, they are: ",
            " {answer}\n",
        )
        intro = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            "\n\n"
        )
        task = Hidden(needles, [(question, answer)], intro if literal else INTRODUCTIONS[1],
                     rng.choice((*NOISE, None)), plain if literal else None)  # fmt: skip
        return self._document(rng, "tracing", length, task)

    def _common_words(self, rng: random.Random, length: int) -> Sample:
        """A numbered list in which a few words come more often than the others."""
        asked = rng.choice((1, 2, 3, 5, 10))
        vocabulary = [f"{a} {b}" if rng.random() < 0.2 else b for a in ADJECTIVES for b in NOUNS]
        chosen = rng.sample(sorted(set(vocabulary)), 3000)
        common, rare = chosen[:asked], chosen[asked:]
        often = rng.randint(8, 30)
        room = length - 260
        items = [word for word in common for _ in range(often)]
        while rare and len(items) * 5.6 < room:
            items += [rare.pop()] * rng.choice((1, 1, 2, 3))
        rng.shuffle(items)
        body = " ".join(f"{i}. {word}" for i, word in enumerate(items, 1))
        question = rng.choice(
            (
                f"What are the {asked} most common words in the above list?",
                f"Which {asked} words come most often in the list?",
            )
        )
        return self._counted(rng, "common_words", length, body, question, " ".join(common))

    def _frequent_words(self, rng: random.Random, length: int) -> Sample:
        """Coded words among dots; how often they come falls by a power law."""
        words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(60)]
        weights = [1 / (rank + 1) ** rng.uniform(1.5, 2.5) for rank in range(len(words))]
        weights.sort(reverse=True)
        items = rng.choices(words, weights, k=max(20, (length - 200) // 6))
        counted = sorted(words, key=items.count, reverse=True)
        body = " ".join(word if rng.random() < 0.8 else "..." for word in items)
        question = "What are the three most frequently appeared words in the above coded text?"
        return self._counted(
            rng, "frequent_words", length, body, question, ", ".join(counted[:3]) + "."
        )

    def _counted(
        self, rng: random.Random, kind: str, length: int, body: str, question: str, answer: str
    ) -> Sample:
        chat = rng.random() < 0.5
        intro = "Below is a list of words. Memorize the ones that appear most often.\n"
        head = self.encode((_chat_start() if chat else "") + intro)
        tail = self.encode(f"\nQuestion: {question}" + (_CHAT_TURN if chat else " Answer:"))
        answered = self.encode(answer if chat else " " + answer)
        room = length - len(head) - len(tail) - len(answered) - 1
        sample = Sample(kind)
        sample.add(head)
        sample.add(self.encode(body)[:room])
        sample.add(tail)
        sample.add(answered, 1.0)
        sample.add([self.end], _END_WEIGHT)
        return sample

    # ---- how it is put together ----------------------------------------------------------------

    def _document(self, rng: random.Random, kind: str, length: int, task: Hidden) -> Sample:
        """Introduction, haystack with the needles at uniform depths, questions and answers."""
        chat = task.plain_form is None and rng.random() < 0.5
        form = task.plain_form or rng.choice(PLAIN_FORMS)
        head = self.encode((_chat_start() if chat else "") + task.introduction)
        tail = Sample(kind)
        for number, (question, answer) in enumerate(task.questions):
            if chat:
                start = "\n\n" if number == 0 else _CHAT_USER
                tail.add(self.encode(start + question + _CHAT_TURN))
                tail.add(self.encode(answer), 1.0)
                tail.add([self.end], _END_WEIGHT)
                tail.add(self.encode("\n"))
            else:
                tail.add(self.encode(form[0].format(question=question)))
                answered = form[1].format(answer=answer)
                tail.add(self.encode(answered.rstrip("\n")), 1.0)
                more = number + 1 < len(task.questions)
                tail.add(self.encode("\n") if more else [self.end], _END_WEIGHT)
        body = self._haystack(rng, length - len(head) - len(tail.tokens), task)
        sample = Sample(kind)
        sample.add(head)
        sample.add(body)
        sample.tokens += tail.tokens
        sample.weights += tail.weights
        return sample.cut(length)

    def _haystack(self, rng: random.Random, room: int, task: Hidden) -> list[int]:
        # A space before, as inside of a sentence; the newline after is for those on lines.
        needles = [self.encode(" " + needle) for needle in task.needles]
        taken = 0
        for kept, needle in enumerate(needles):
            taken += len(needle) + 1
            if taken > room:
                needles = needles[:kept]
                break
        room = max(0, room - sum(len(needle) + 1 for needle in needles))
        on_lines = task.noise is not None
        if task.noise is not None:
            line = self.encode(task.noise + "\n")
            hay = (line * (room // len(line) + 1))[: room // len(line) * len(line)]
        else:
            hay = self.span(rng, room, rng.random() > _MANUAL_SHARE) if room else []
        array = np.array(hay, np.int64)
        found = np.flatnonzero(self._newline[array]) + 1 if on_lines else self.boundaries(array)
        places = np.concatenate([[0], found]) if len(hay) > 1 else np.zeros(1, np.int64)
        depths = sorted(rng.random() * len(hay) for _ in needles)
        chosen = places[np.minimum(np.searchsorted(places, depths), len(places) - 1)].tolist()
        newline = self.encode("\n")
        body, before = [], 0
        for place, needle in zip(chosen, needles, strict=True):
            body += hay[before:place]
            follows_line = not body or bool(self._newline[body[-1]])
            body += needle + (newline if follows_line and rng.random() < 0.7 else [])
            before = place
        return body + hay[before:]


_CHAT_TURN = "<|im_end|>\n<|im_start|>assistant\n"
_CHAT_USER = "<|im_start|>user\n"


def _chat_start() -> str:
    return f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n{_CHAT_USER}"
