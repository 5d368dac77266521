"""docs/models.md says of each causal type of transformers what a tiny model of it does."""

from __future__ import annotations

import pytest
from compatibility.model_types import GENERIC, TYPES, judged, rows


def test_the_table_has_every_type() -> None:
    assert sorted(rows()) == TYPES
    assert sum(word == GENERIC for word, _ in rows().values()) >= 125


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_the_table_is_right(model_type: str) -> None:
    assert judged(model_type)[0] == rows()[model_type][0]
