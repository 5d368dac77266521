"""The hard set: what it asks, and which tasks of it count."""

from __future__ import annotations

import re
from typing import Any

import pytest

from offload.bench.eval.haystack import prose_words
from offload.bench.eval.ruler import HARD_TASKS, ruler_samples
from offload.bench.eval.ruler.asked import TASKS
from offload.bench.eval.sample import Sample, TooShort
from offload.bench.eval.summary import cell_rows, summaries


def samples_of(task: str, length: int = 6000, count: int = 3) -> list[Sample]:
    words = prose_words(None)
    return ruler_samples(
        task, length, count, seed=1, count_tokens=lambda text: len(text.split()), prose=words
    )


@pytest.mark.parametrize("task", HARD_TASKS)
def test_they_fit_and_are_drawn_again_alike(task: str) -> None:
    samples = samples_of(task)
    assert samples == samples_of(task)
    assert len({sample.text for sample in samples}) == 3
    for sample in samples:
        assert len(sample.text.split()) <= 6000 - len(sample.answer_prefix.split())
        assert all(output in sample.text for output in sample.outputs)


@pytest.mark.parametrize("task", ["asked", "asked_lines", "asked_long"])
def test_the_question_is_not_in_what_is_read(task: str) -> None:
    for sample in samples_of(task):
        assert sample.decodes_prefix
        for question in (sample.answer_prefix, *sample.questions):
            (key,) = set(re.findall(r"number for (\S+) mentioned", question))
            needle = f"One of the special magic numbers for {key} is: "
            assert sample.text.count(f" {key} ") == sample.text.count(needle) == 1
        asked = [sample.answer_prefix, *sample.questions][-len(sample.outputs) :]
        for question, output in zip(asked, sample.outputs, strict=True):
            key = re.findall(r"number for (\S+) mentioned", question)[0]
            assert f"for {key} is: {output}." in sample.text


def test_two_steps() -> None:
    for sample in samples_of("two_steps"):
        key = re.findall(r"word for (\S+) mentioned", sample.answer_prefix)[0]
        word = re.findall(rf"magic words for {key} is: (\S+)\.", sample.text)[0]
        assert f"magic numbers for {word} is: {sample.outputs[0]}." in sample.text
        assert f"for {word} mentioned" in sample.questions[0].format(said=word)


def test_long_answers_have_thousands_of_tokens() -> None:
    quiz = TASKS["asked_long"]
    (sample, *_) = samples_of("asked_long")
    assert len(sample.questions) == quiz.num_questions - 1
    assert sample.max_new_tokens > 2000
    assert len(sample.outputs) == quiz.num_judged
    with pytest.raises(TooShort, match="raise --context"):
        samples_of("asked_long", 3000)


def test_a_task_counts_where_full_attention_has_30_to_97_points() -> None:
    def record(task: str, index: int, full: float) -> dict[str, Any]:
        answer = {"decode_seconds": 1.0, "build_seconds": 0.0, "new_tokens": 2}
        answer |= {"attended_tokens": None, "scored_tokens": None}
        answers = {"full": answer | {"score": full}, "quest 64": answer | {"score": 0.0}}
        known = {"prompt_tokens": 9, "truncated_tokens": 0, "prefill_seconds": 0.1}
        return {"task": task, "length": 9, "index": index, "answers": answers, **known}

    scores = {"easy": (1.0, 1.0), "hard": (1.0, 0.5), "hopeless": (0.2, 0.2)}
    records = [record(task, i, x) for task, both in scores.items() for i, x in enumerate(both)]
    of_full = (0.3, 0.97)
    rows = cell_rows(records, ["full", "quest 64"], of_full=of_full)
    assert [row["counts"] for row in rows] == [False, True, False]
    (_, line) = summaries(records, ["full", "quest 64"], of_full=of_full)
    assert line["difference"] == -0.75
