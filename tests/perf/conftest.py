"""Scripts of perf hide the bars of transformers in their process, which is that of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def bars_as_before() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # parts of it are untyped
    had_bars = logging.is_progress_bar_enabled()
    yield
    if had_bars:
        logging.enable_progress_bar()
