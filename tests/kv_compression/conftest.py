"""Tiny models whose sequences have a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload import OffloadedModel

PAGE_TOKENS = 16
TOKEN_BYTES = 3 * 2 * 2 * 32 * 4  # layers, K|V, KV heads, head_dim, float32
WINDOW_BYTES = 3 * 16 * 6 * 32 * 4  # layers, queries, query heads, head_dim, float32


@pytest.fixture
def bounded(long_folder: Path) -> Iterator[Callable[..., Any]]:
    """Loads the model with room for `slots` of a sequence (None: no bound), condensed by attention
    unless `condense_by` says otherwise; afterwards nothing is left in its KV store."""
    models = []

    def load(slots: int | None, policy: Any = "full", **options: Any) -> Any:
        options = {"page_tokens": PAGE_TOKENS, "num_threads": 1} | options
        if slots is not None:
            per_sequence = slots * TOKEN_BYTES + WINDOW_BYTES
            options = {"host_bytes_per_sequence": per_sequence} | options
        if "host_bytes_per_sequence" in options:
            options = {"condense_by": "attention"} | options
        model = OffloadedModel.from_pretrained(long_folder, policy=policy, **options)
        models.append(model)
        return model

    yield load
    import gc

    gc.collect()
    for model in models:
        assert model.kv_store.num_sequences == 0
        assert model.kv_store.host_bytes_used == 0
