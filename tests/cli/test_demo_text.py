"""The text that demo, benchmarks and tests read."""

from __future__ import annotations

import pytest

from offload.system import stdlib_text as demo_text
from offload.system.stdlib_text import (
    DEMO_ANSWER,
    DEMO_NEEDLE,
    DEMO_QUESTION,
    filler_prompt,
    stdlib_docstrings,
    stdlib_paragraphs,
)


def words(text: str) -> int:
    return len(text.split())


def test_the_text_is_the_same_every_time_and_long_enough() -> None:
    paragraphs = stdlib_paragraphs()
    demo_text._module_docstrings.cache_clear()
    assert paragraphs == stdlib_paragraphs()
    # The longest benchmark reads 8K tokens; English has about four characters per token.
    assert sum(map(len, paragraphs)) > 200_000
    docstrings = list(stdlib_docstrings())
    assert len(set(docstrings)) == len(docstrings)


def test_the_text_does_not_know_the_answer() -> None:
    text = "\n\n".join(stdlib_paragraphs())
    assert DEMO_ANSWER not in text
    assert "Fairhaven" not in text
    assert DEMO_ANSWER in DEMO_NEEDLE
    assert DEMO_ANSWER not in DEMO_QUESTION


@pytest.mark.parametrize("num_tokens", [200, 1000, 6000])
def test_a_prompt_is_nearly_as_long_as_asked_for(num_tokens: int) -> None:
    prompt = filler_prompt(words, num_tokens=num_tokens, question=DEMO_QUESTION, needle=DEMO_NEEDLE)
    assert 0.9 * num_tokens - 100 < words(prompt) <= num_tokens
    assert prompt.count(DEMO_NEEDLE) == 1
    assert prompt.endswith(DEMO_QUESTION)


def test_the_needle_is_where_it_should_be() -> None:
    prompt = filler_prompt(words, num_tokens=2000, question="Where?", needle="Here it is.")
    paragraphs = prompt.split("\n\n")[1:-1]
    assert paragraphs.index("Here it is.") == pytest.approx((len(paragraphs) - 1) / 2, abs=1)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="leaves no room for any text"):
        filler_prompt(words, num_tokens=5, question="Why?")
    with pytest.raises(ValueError, match="tokens short of this context"):
        filler_prompt(words, num_tokens=10**7, question="Why?")


def test_a_python_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_text, "PROSE_MODULES", "sys no_such_module.at_all")
    with pytest.raises(RuntimeError, match="--prompt-file"):
        stdlib_paragraphs()
