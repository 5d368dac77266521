"""Verifying drafts without a `generate()` around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def verifying(model: Any, cache: Any) -> Iterator[None]:
    """What comes after `cache` is decoded, as in a generation whose prompt ends there."""
    with model._offload.generation(has_assistant=False):
        generation = model._offload.generation_now
        generation.cache, generation.prompt_columns = cache, cache.get_seq_length()
        yield
