"""A question with its right answers, and the score of what a model says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

CountTokens = Callable[[str], int]  # of a text, with the special tokens that a tokenizer adds


Key = tuple[str, int, int]


class Item(Protocol):
    """What records are kept of."""

    @property
    def task(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def index(self) -> int: ...


def key_of(item: Item) -> Key:
    """What tells it from others of its run: task, length, index."""
    return item.task, item.length, item.index


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        task, length, index: which; `length` tokens are what the task was asked for, with its own
            count of the answer's, not what the prompt has.
        text: what the user says.
        answer_prefix: how the model's answer begins.
        delimiter: between the two where there is no chat template.
        outputs: the right answers.
        max_new_tokens: of the answer, `questions` included.
        decodes_prefix: the answer's beginning is decoded: it asks something.
        questions: that follow in the answer, when what the model says before has come to an end
            (`PART_END`); `{said}` is what it has said. They are decoded, too.
    """

    task: str
    length: int
    index: int
    text: str
    answer_prefix: str
    outputs: tuple[str, ...]
    max_new_tokens: int
    delimiter: str = " "
    decodes_prefix: bool = False
    questions: tuple[str, ...] = ()


PART_END = re.compile(r"[.,;\n]")
CountPrompt = Callable[[Sample], int]  # of all that the model reads before it answers


def string_match_all(answer: str, outputs: Sequence[str]) -> float:
    """The share of `outputs` that stand in `answer`, whatever their case: RULER's score."""
    said = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return sum(output.lower() in said for output in outputs) / len(outputs)


class TooShort(ValueError):
    """A length that leaves no room for a task's prompt."""

    def __init__(self, task: str, length: int) -> None:
        super().__init__(task, length)  # as pickle makes it again in another process

    def __str__(self) -> str:
        task, length = self.args
        return f"{task}: {length:,} tokens leave no room for its prompt and answer; raise --context"
