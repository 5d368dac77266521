"""Prompts of tests are short: so are slices of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from offload.engine.scheduler import _LEAST
from offload.engine.working_memory import WorkingMemory


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.engine.scheduler._LEAST", dict.fromkeys(_LEAST, 16))


@pytest.fixture(autouse=True)
def passes_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is counted in tests/serve/test_served_memory.py."""

    def of(model: Any, runtime: Any) -> WorkingMemory:
        return WorkingMemory(0, 0, 0, runtime.config.prefill_slice_tokens, sys.maxsize)

    monkeypatch.setattr(WorkingMemory, "of", of)
