"""Prompts of tests are short: so are slices of them."""

from __future__ import annotations

import pytest
from cases.inside import passes_take_nothing

from offload.engine.scheduler import _LEAST


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.engine.scheduler._LEAST", dict.fromkeys(_LEAST, 16))
    passes_take_nothing(monkeypatch)
