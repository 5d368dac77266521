"""Verifying drafts without a `generate()` around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cases.inside import runtime_of


@contextmanager
def verifying(model: Any, cache: Any) -> Iterator[None]:
    """What comes after `cache` is decoded, as in a generation whose prompt ends there."""
    with runtime_of(model).generation(has_assistant=False):
        generation = runtime_of(model).current_generation
        generation.cache, generation.prompt_columns = cache, cache.get_seq_length()
        yield
