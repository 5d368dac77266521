"""What scores are made of, and how they are summed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.bench.eval.haystack import prose_words
from offload.bench.eval.labels import label_of, policy_label, policy_options
from offload.bench.eval.ruler import PROSE_TASKS, RULER_TASKS, ruler_samples
from offload.bench.eval.sample import string_match_all
from offload.bench.eval.summary import cell_rows, summaries
from offload.bench.eval.words import NeedleWords, word_list
from offload.cli.eval.options import Compared
from offload.policies import Quest, TidalDecode
from offload.policies.registry import make_policy

PROSE = ("It was a dark night. The rain fell in torrents! Who was there? " * 300).split()


def count_words(text: str) -> int:
    return len(text.split())


def record(task: str, index: int, full: float, sparse: float) -> dict[str, Any]:
    def answer(score: float) -> dict[str, Any]:
        return {
            "score": score,
            "new_tokens": 5,
            "attended_tokens": 64.0,
            "decode_seconds": 0.5,
            "build_seconds": 0.0,
        }

    return {
        "task": task,
        "length": 100,
        "index": index,
        "prompt_tokens": 90,
        "truncated_tokens": 0,
        "prefill_seconds": 1.0,
        "answers": {"full": answer(full), "quest 64": answer(sparse)},
    }


def test_only_cells_in_which_full_attention_scores_count() -> None:
    records = [record("easy", 0, 1.0, 0.5), record("easy", 1, 1.0, 1.0)]
    records += [record("hard", 0, 0.0, 1.0), record("hard", 1, 0.0, 0.0)]
    full, quest = summaries(records, ["full", "quest 64"])
    assert (full["score"], full["difference"], full["interval"]) == (1.0, 0.0, (0.0, 0.0))
    assert (quest["score"], quest["difference"]) == (0.75, -0.25)
    # Differences of -0.5 and 0, and one of 1 and one of -1 that were not seen.
    middle, spread = -0.5 / 4, np.std([-0.5, 0.0, 1.0, -1.0])
    variance_of_two = (0.125 - 0.0625) * 2 / 4  # what n - 1 instead of n adds
    reach = 1.959964 * ((spread**2 + variance_of_two) / 4) ** 0.5
    assert quest["interval"] == pytest.approx((middle - reach, middle + reach))
    assert quest["decoded_tokens"] == 4 * 4
    easy, hard = cell_rows(records, ["full", "quest 64"])
    assert (easy["counts"], hard["counts"]) == (True, False)
    assert hard["scores"] == {"full": 0.0, "quest 64": 0.5}


@pytest.mark.parametrize(
    ("answer", "score"),
    [("", 0.0), ("  \n", 0.0), ("ABC", 0.5), ("it is abc, and 12.", 1.0), ("ab c 1 2", 0.0)],
)
def test_score(answer: str, score: float) -> None:
    assert string_match_all(answer, ["abc", "12"]) == score


@pytest.mark.parametrize("task", RULER_TASKS)
def test_ruler_samples(task: str) -> None:
    made = {
        seed: ruler_samples(task, 1500, 3, seed=seed, count_tokens=count_words, prose=PROSE)
        for seed in (0, 1)
    }
    again = ruler_samples(task, 1500, 2, seed=0, count_tokens=count_words, prose=PROSE)
    assert again == made[0][:2]
    assert made[0] != made[1]
    for sample in made[0]:
        assert sample.task == task
        assert all(output in sample.text for output in sample.outputs)
        assert 700 < count_words(sample.text) <= 1500
    if task in PROSE_TASKS:
        with pytest.raises(ValueError, match="give more text by --haystack"):
            ruler_samples(task, 9000, 1, seed=0, count_tokens=count_words, prose=PROSE)
    with pytest.raises(ValueError, match="100 tokens leave no room"):
        ruler_samples(task, 100, 1, seed=0, count_tokens=count_words, prose=PROSE)


@pytest.mark.parametrize("task", [task for task in PROSE_TASKS if task in RULER_TASKS])
def test_prose_of_which_500_words_do_not_fit(task: str) -> None:
    """As that of words that are many tokens each: it has the prompt's length all the same."""

    def count(text: str) -> int:
        return 5 * count_words(text)

    for sample in ruler_samples(task, 1800, 3, seed=0, count_tokens=count, prose=PROSE):
        assert 1300 < count(sample.text) <= 1800 - sample.max_new_tokens
        assert all(output in sample.text for output in sample.outputs)


def test_needles_in_text_without_sentences() -> None:
    words = [f"word{i}" for i in range(4000)]
    samples = ruler_samples(
        "niah_multivalue", 1500, 3, seed=0, count_tokens=count_words, prose=words
    )
    for sample in samples:
        places = [sample.text.index(output) / len(sample.text) for output in sample.outputs]
        assert max(places) - min(places) > 0.1


def test_prose_without_spaces(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\u5f7c\u306f\u3001\u8d70\u308b\u3002" * 2000, encoding="utf-8")
    words = prose_words(path)
    assert len(words) == 4000


def test_windows_shrink_with_the_budget() -> None:
    policies = Compared("quest,streaming_llm,full", "1024,128,32", []).policies()
    assert [label_of(policy) for policy in policies] == [
        "full",
        "quest 1024",
        "streaming_llm 1024",
        "quest 128",
        "streaming_llm 128",
        "quest 32",
        "streaming_llm 32",
    ]
    quests = [policy for policy in policies if policy.name == "quest"]
    assert [policy.recent_tokens for policy in quests] == [64, 32, 8]
    assert [policy.sink_tokens for policy in quests] == [4, 4, 2]
    for name in ("lychee_cluster", "hard_kv", "per_head", "union"):
        _, usual, least, little = Compared(name, "1024,256,64", []).policies()
        assert usual == make_policy(name)  # as it decodes everywhere else
        assert [(x.sink_tokens, x.recent_tokens) for x in (least, little)] == [(16, 64), (4, 16)]
        assert [label_of(x) for x in (usual, little)] == [f"{name} 1024", f"{name} 64"]
    (_, given) = Compared("quest", "128", ["recent_tokens=20", "quest.page_tokens=8"]).policies()
    assert given == make_policy("quest", budget_tokens=128, recent_tokens=20, page_tokens=8)
    assert label_of(given) == "quest 128 recent_tokens=20 page_tokens=8"
    assert len(Compared("quest", "128,128", ["recent_tokens=32,20"]).policies()) == 1 + 2


def test_words_are_those_of_wonderwords() -> None:
    wonderwords = pytest.importorskip("wonderwords", reason="the extra test is not installed")
    categories = wonderwords.RandomWord()._categories
    for name in ("nouns", "adjectives", "verbs"):
        assert set(word_list(name)) == set(categories[name])


def test_needle_words_are_sorted() -> None:
    adjectives, nouns = ["old", "red", "old-fashioned", "able"], ["tree", "fashion", "a"]
    words = NeedleWords(adjectives, nouns)
    expected = sorted(f"{adjective}-{noun}" for adjective in adjectives for noun in nouns)
    assert [words[i] for i in range(12)] == expected
    assert len(words) == 12
    with pytest.raises(IndexError):
        words[12]


def test_labels_have_what_is_not_the_default() -> None:
    assert policy_label(make_policy("full")) == "full"
    assert policy_label(make_policy("streaming_llm", budget_tokens=200)) == "streaming_llm"
    policy = make_policy("exact_topk", budget_tokens=100, recent_tokens=8)
    assert policy_label(policy) == "exact_topk recent_tokens=8"
    tidal = TidalDecode(Quest(budget_tokens=100, page_tokens=32))
    assert policy_label(tidal) == "tidal_decode inner=quest page_tokens=32"
    assert policy_options(tidal)["budget_tokens"] == 100
