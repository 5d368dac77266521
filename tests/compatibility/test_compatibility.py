"""docs/compatibility.md says what its programs do, and none of them gives a wrong answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from compatibility.document import CALLS, DOCUMENT, FEATURES, render
from compatibility.table import DEFECTS, WORKS, Feature, Side, Verdict, both_sides, judge, same


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side]]:
    with both_sides() as pair:
        yield pair


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """Those found so far, by feature."""
    return {}


@pytest.mark.parametrize("name", FEATURES, ids=lambda name: re.sub(r"\W+", "-", name).strip("-"))
def test_feature(name: str, sides: tuple[Side, Side], verdicts: dict[str, Verdict]) -> None:
    """As in the stock model, or refused in words of ours."""
    verdicts[name] = verdict = judge(FEATURES[name], *sides)
    assert verdict.result not in DEFECTS, verdict
    if FEATURES[name] in CALLS:
        assert (verdict.result, verdict.num_same) == (WORKS, verdict.num_calls)


@pytest.mark.docs
def test_document(sides: tuple[Side, Side], verdicts: dict[str, Verdict]) -> None:
    for name, feature in FEATURES.items():
        if name not in verdicts:
            verdicts[name] = judge(feature, *sides)
    assert DOCUMENT.read_text("utf-8") == render(verdicts), "run: make report"


def test_every_feature_has_a_row_of_its_own() -> None:
    rows = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| ")]
    names = [line.split(" | ")[0].removeprefix("| ") for line in rows]
    assert [name for name in names if name not in ("|", "---")] == list(FEATURES)


def fail(side: Side) -> None:
    raise NotImplementedError("not in offload/: these are no words of ours")


@pytest.mark.parametrize(
    ("run", "result"),
    [
        (lambda side: 1, "works"),
        (lambda side: int(side.is_ours), "other result"),
        (lambda side: [torch.ones(2) + 0.01 * side.is_ours], "other result"),
        (lambda side: side.is_ours and [][0], "broken"),
        (lambda side: side.is_ours and fail(side), "broken"),
        (lambda side: side.is_ours and side.model.train(), "refused"),
    ],
)
def test_a_wrong_answer_is_told_from_a_refusal(
    sides: tuple[Side, Side], run: object, result: str
) -> None:
    assert judge(Feature("", run), *sides).result == result  # type: ignore[arg-type]


def test_a_program_that_the_stock_model_fails_is_none(sides: tuple[Side, Side]) -> None:
    with pytest.raises(NotImplementedError, match="no words of ours"):
        judge(Feature("", fail), *sides)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.tensor([1]), torch.tensor([2])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0])),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (1.0, 1.1),
        ("a", "b"),
    ],
)
def test_what_is_not_the_same(got: object, expected: object) -> None:
    assert same(expected, expected, 1e-3)
    assert not same(got, expected, 1e-3)
